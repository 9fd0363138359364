// One lane: its tokens, its clock and keyboard navigation.

import { element } from "./dom.js";

// Incomplete characters, line ends and combining accents have no width: these tokens get a narrow box to click on.
const WIDTHLESS = /^[\p{C}\p{M}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}]*$/u;
const WHITESPACE = { "\n": "↵", "\t": "⇥", " ": "␣" };
const ORIGINS = {
  accepted: "accepted draft",
  corrected: "corrected by the target",
  bonus: "bonus: all drafts were accepted",
  plain: "plain",
};

/** Return a token's text with symbols for whitespace. */
export function visible(text) {
  return /^\s+$/.test(text) ? [...text].map((each) => WHITESPACE[each] ?? "␣").join("") : text.replaceAll("\n", "↵");
}

export class Lane {
  constructor(root, choose) {
    this.root = root;
    this.text = root.querySelector(".text");
    this.empty = root.querySelector(".empty");
    this.choose = choose;
    this.text.addEventListener("click", (event) => this.#select(event.target.closest(".tok")));
    this.text.addEventListener("keydown", (event) => this.#move(event));
    this.text.addEventListener("focusin", (event) => this.#enter(event.target));
    this.clear("", 1);
  }

  clear(prompt, wanted) {
    this.wanted = wanted;
    this.tokens = [];
    this.selected = this.stop = null;
    this.text.tabIndex = 0;
    this.text.replaceChildren();
    this.text.hidden = !prompt;
    this.empty.hidden = Boolean(prompt);
    if (prompt) {
      const before = element("span", "prompt-text", prompt);
      before.setAttribute("role", "presentation");
      this.text.append(before);
    }
    this.field("tok_s", "–");
    this.time(0);
    this.#progress();
  }

  field(name, value) {
    this.root.querySelector(`[data-field=${name}]`).textContent = value;
  }

  time(seconds) {
    this.field("clock", seconds.toFixed(seconds < 10 ? 3 : 1));
  }

  /** Draw a round's tokens, each after the drafts rejected at its position. */
  show(round) {
    const isFollowed = this.text.scrollTop + this.text.clientHeight > this.text.scrollHeight - 24;
    round.tokens.forEach((token, at) => {
      const isLast = at === round.tokens.length - 1;
      const { guesses: tried, tokens } = token.place;
      const failed = tried.filter((guess) => !guess.accepted).map((guess) => tokens[guess.row]);
      const guesses = failed.map((text) => guess(text, ""));
      if (isLast) guesses.push(...round.dropped.map((text) => guess(text, "dropped")));
      const said = element("span", WIDTHLESS.test(token.text) ? "said thin" : "said", token.text);
      const shown = element("span", `tok ${token.origin}`, ...guesses, said);
      shown.setAttribute("role", "option");
      shown.setAttribute("aria-selected", "false");
      shown.tabIndex = -1;
      const instead = failed.length ? `, instead of ${failed.map(visible).join(", ")}` : "";
      shown.setAttribute("aria-label", `${visible(token.name)}: ${ORIGINS[token.origin]}${instead}`);
      this.tokens.push({ element: shown, token });
      this.text.append(shown);
      if (!this.stop) this.#stopAt(shown);
    });
    if (round.figures.tok_s !== null) this.field("tok_s", speed(round.figures.tok_s));
    this.#progress();
    if (isFollowed) this.text.scrollTop = this.text.scrollHeight;
  }

  #progress() {
    const progress = this.root.querySelector("[data-field=progress]");
    progress.max = this.wanted;
    progress.value = this.tokens.length;
  }

  unselect() {
    this.selected?.setAttribute("aria-selected", "false");
    this.selected = null;
  }

  #select(element) {
    const found = this.tokens.findIndex((each) => each.element === element);
    if (found < 0) return;
    if (element !== this.selected) {
      this.unselect();
      this.selected = element;
      element.setAttribute("aria-selected", "true");
      this.#stopAt(element);
      this.choose(this, found);
    }
    if (document.activeElement !== element) element.focus();
  }

  /** Set the only token at which Tab stops (roving tabindex). */
  #stopAt(element) {
    if (this.stop) this.stop.tabIndex = -1;
    this.text.tabIndex = -1;
    element.tabIndex = 0;
    this.stop = element;
  }

  /** Handle keyboard focus on a token, or on the text: then move to the token that had it last. */
  #enter(target) {
    if (target !== this.text) this.#select(target.closest(".tok"));
    else if (this.stop && this.text.matches(":focus-visible")) this.#select(this.stop);
  }

  #move(event) {
    const at = this.tokens.findIndex((each) => each.element === this.selected);
    const last = this.tokens.length - 1;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + 8, ArrowUp: at - 8, Home: 0, End: last }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.#select(this.tokens[Math.min(Math.max(to, 0), last)].element);
  }
}

export function speed(value) {
  return value >= 100 ? Math.round(value).toString() : value.toFixed(1);
}

function guess(text, className) {
  const deleted = element("del", className, visible(text));
  deleted.setAttribute("aria-hidden", "true");
  return deleted;
}
