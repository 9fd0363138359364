// Explains a token: one sentence, then a table of the distributions.

import { element } from "./dom.js";
import { visible } from "./lane.js";

const percent = (share) => (share > 0 && share < 0.001 ? "<0.1%" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`);

export class Inspector {
  constructor(root) {
    this.empty = root.querySelector(".empty");
    this.detail = root.querySelector(".detail");
  }

  clear() {
    this.empty.hidden = false;
    this.detail.hidden = true;
  }

  /** `token`: as sent by the server; `temperature`: of the race; `isSameText`: whether the server runs with --same-text. */
  show(token, temperature, isSameText) {
    this.empty.hidden = true;
    this.detail.hidden = false;
    this.detail.replaceChildren(story(token, temperature, isSameText), table(token));
  }
}

function story(token, temperature, isSameText) {
  const line = element("p", "story");
  const { guesses, tokens, is_point_mass: isPointMass } = token.place;
  const said = code(token.name);
  const isGreedy = temperature === 0;
  const showsChances = !isGreedy && hasChances(token.place);
  const rule = isGreedy
    ? "At temperature 0 a draft is accepted if it is the target’s most likely token."
    : isSameText
      ? "With --same-text a draft is accepted if it is the token that plain decoding samples."
      : "Acceptance probabilities and residuals are shown only with --verifier rejection, the demo’s default.";
  const failed = guesses.filter((guess) => !guess.accepted);
  if (token.origin === "plain") {
    line.append("No draft at this position: the target generated ", said, ".");
  } else if (token.origin === "bonus") {
    line.append("All drafts of this round were accepted, so its target pass also gave the bonus token ", said, ".");
  } else if (token.origin === "accepted") {
    const chance = guesses.at(-1).chance;
    line.append("The draft proposed ", said, " and the target accepted it");
    line.append(showsChances ? ` (acceptance probability ${percent(chance)}). ` : ". ");
    if (failed.length) line.append("Rejected before it: ", ...names(failed, tokens), ". ");
  } else {
    line.append("The draft proposed ", ...names(failed, tokens), showsChances ? "; it was rejected " : "; the emitted token is ");
    if (showsChances) line.append(`(acceptance probability ${failed.map((guess) => percent(guess.chance)).join(", ")}). Sampled from the residual: `);
    line.append(said, ". ");
  }
  if (guesses.length && !showsChances) line.append(rule, " ");
  if (isPointMass && !isGreedy) line.append("This method’s drafts are point masses: they have no distribution.");
  return line;
}

function hasChances(place) {
  return place.guesses.some((guess) => guess.chance !== null);
}

function names(guesses, tokens) {
  return guesses.flatMap((guess, at) => [...(at ? [", "] : []), code(tokens[guess.row])]);
}

function table(token) {
  const { place } = token;
  const columns = [
    place.draft && ["draft", place.is_point_mass ? "Draft (point mass)" : "Draft", place.draft],
    place.odds && ["odd", "Target, before the argmax", place.odds],
    ["target", place.odds ? "Target, greedy" : "Target", place.target],
    place.residual && ["residual", "Residual: max(0, target − draft)", place.residual],
  ].filter(Boolean);
  const odds = element("table", "odds");
  odds.createCaption().textContent = caption(place);
  const head = odds.createTHead().insertRow();
  for (const title of ["Token", ...columns.map((column) => column[1])]) {
    const cell = element("th", "", title);
    cell.scope = "col";
    head.append(cell);
  }
  const body = odds.createTBody();
  place.tokens.forEach((name, at) => {
    const row = body.insertRow();
    if (at === place.row) row.className = "emitted";
    const first = element("th", "", code(name));
    first.scope = "row";
    row.append(first);
    for (const [kind, , values] of columns) row.insertCell().append(share(values[at], kind));
  });
  return element("div", "scroll", odds);
}

function caption(place) {
  const parts = ["The most likely tokens at this position, with the verifier’s probabilities."];
  if (hasChances(place) && !place.residual) parts.push("The residual is empty.");
  return parts.join(" ");
}

function share(value, kind) {
  const bar = element("span", `bar ${kind}`);
  bar.style.width = `${100 * value}%`;
  if (!value) bar.style.visibility = "hidden";
  return element("div", "share", element("span", "", value ? percent(value) : "0"), bar);
}

function code(text) {
  return element("code", "", visible(text));
}
