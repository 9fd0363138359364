// The page: reads the form, runs a race and shows its events.

import { curve, histogram } from "./charts.js";
import { element } from "./dom.js";
import { Inspector } from "./inspector.js";
import { Lane, speed } from "./lane.js";
import { LANES, Player } from "./player.js";
import { about, race, Refused } from "./stream.js";

const EXAMPLES = {
  "a function": 'def remove_duplicates(items: list[str]) -> list[str]:\n    """Keep the first of equal items."""\n',
  "an edit": "# Before\nHOST = \"localhost\"\nPORT = 8080\nTIMEOUT_SECONDS = 30\nMAX_RETRIES = 5\nLOG_LEVEL = \"info\"\n\n# After, with the port changed\nHOST = \"localhost\"\nPORT =",
  "records": '{"id": 1, "name": "Ada", "city": "London", "paid": true}\n{"id": 2, "name": "Emil", "city": "Oslo", "paid": false}\n{"id": 3,',
  "a story": "The lighthouse keeper had not spoken to anyone for eleven days when",
};
const RATES = { 1: "real time", 0.5: "half speed", 0.2: "1/5 speed", 0.1: "1/10 speed", 0.05: "1/20 speed", 0.02: "1/50 speed" };
const LENGTHS = [32, 64, 128, 256];
const WATCHABLE = 9; // seconds of a replay

const byId = (id) => document.getElementById(id);
const [form, status, verdict] = ["setup", "status", "verdict"].map(byId);
const isCalm = matchMedia("(prefers-reduced-motion: reduce)");
const inspector = new Inspector(byId("inspector"));
const lanes = Object.fromEntries(LANES.map((name) => [name, new Lane(byId(`lane-${name}`), inspect)]));
const player = new Player(showRound, tick, finished);
let offer = { methods: {}, plain_tok_s: 0, lossless: true, same_text: false };
let running = null; // AbortController of the running race
let wanted = null; // settings of the race that is shown
let result = null; // its final event
let counts = {};

// --- the form ---------------------------------------------------------------------------------------------------------------

function readForm() {
  return {
    prompt: byId("prompt").value,
    method: byId("method").value,
    num_draft_tokens: byId("auto").checked ? "auto" : Number(byId("k").value),
    temperature: Number(byId("temperature").value),
    accuracy: Number(byId("accuracy").value) / 100,
    max_tokens: Number(byId("length").value),
    seed: Math.floor(Math.random() * 2 ** 31),
  };
}

function describeForm() {
  const isAuto = byId("auto").checked;
  byId("k").disabled = isAuto;
  byId("k").max = offer.methods[byId("method").value] ?? 16;
  byId("k-value").value = isAuto ? "auto" : byId("k").value;
  const temperature = Number(byId("temperature").value);
  byId("temperature-value").value = temperature.toFixed(1);
  byId("temperature-note").textContent = temperatureNote(temperature);
  const accuracy = Number(byId("accuracy").value);
  byId("accuracy-value").value = `${accuracy}%`;
  byId("accuracy-note").textContent =
    accuracy === 100
      ? "The real draft. Move to the left to replace drafts by wrong tokens."
      : `${100 - accuracy}% of the drafts are replaced by wrong tokens. The output stays correct and becomes slower.`;
}

function temperatureNote(temperature) {
  if (!offer.lossless) return "The verifier is lossy: the texts follow different distributions.";
  if (temperature && !offer.same_text) return "Two samples from one distribution: the texts differ.";
  return `${temperature ? "Samples with common random numbers" : "Greedy"}: both texts must be equal.`;
}

function fillForm() {
  byId("method").replaceChildren(...Object.keys(offer.methods).map((name) => new Option(name, name)));
  const lengths = LENGTHS.filter((length) => length <= offer.limits.max_tokens);
  byId("length").replaceChildren(...lengths.map((length) => new Option(`${length} tokens`, length, false, length === 128)));
  byId("prompt").maxLength = offer.limits.prompt_chars;
  byId("prompt").value = Object.values(EXAMPLES)[0];
  for (const [name, text] of Object.entries(EXAMPLES)) {
    const button = element("button", "", name);
    button.type = "button";
    button.addEventListener("click", () => {
      byId("prompt").value = text;
      byId("prompt").focus();
    });
    byId("examples").append(button);
  }
  byId("models").textContent = `target: ${offer.target}${offer.draft ? ` · draft: ${offer.draft}` : ""}`;
  const rates = Object.keys(RATES).map(Number).sort((a, b) => b - a);
  byId("rate").replaceChildren(...rates.map((rate) => new Option(RATES[rate], rate)));
  describeForm();
  chooseRate();
}

/** Choose the replay speed at which plain decoding takes about `WATCHABLE` seconds, but not faster than real time. */
function chooseRate() {
  const seconds = Number(byId("length").value) / (offer.plain_tok_s || 20);
  const distance = (rate) => Math.abs(Math.log(seconds / rate / WATCHABLE));
  const rates = Object.keys(RATES).map(Number);
  byId("rate").value = rates.reduce((best, rate) => (distance(rate) < distance(best) ? rate : best));
  useRate();
}

function useRate() {
  const rate = Number(byId("rate").value);
  player.rate = isCalm.matches ? Infinity : rate;
  byId("rate-note").textContent = isCalm.matches ? "as they come" : rate === 1 ? "in real time" : `at ${RATES[rate]}`;
}

// --- a race -----------------------------------------------------------------------------------------------------------------

async function start(event) {
  event?.preventDefault();
  if (running) return;
  const asked = readForm();
  const controller = (running = new AbortController());
  setBusy(true);
  verdict.textContent = "";
  let isOver = false;
  say("Joining the queue …");
  try {
    await race(asked, (event) => (isOver = handle(event, asked)), controller.signal);
    if (!isOver) throw new Refused("The connection was closed. Is outrider demo still running?");
  } catch (error) {
    player.finish();
    if (controller.signal.aborted) say("Stopped.");
    else say(error instanceof Refused ? error.message : "The server does not answer. Is outrider demo still running?", true);
  } finally {
    running = null;
    setBusy(false);
  }
}

/** Show an event of the requested race. Return whether it was the last one. */
function handle(event, asked) {
  if (event.type === "waiting") {
    say(event.ahead === 1 ? "One visitor is racing. You are next." : `${event.ahead} visitors are before you.`);
  } else if (event.type === "started") {
    wanted = asked; // only now: until it starts, the previous race can be replayed
    reset();
    say("Racing …");
  } else if (event.type === "round") {
    player.add(event);
  } else if (event.type === "finished") {
    result = event;
    player.finish();
    say("");
  } else if (event.type === "error") {
    player.finish();
    say(event.message, true);
  }
  return event.type === "finished" || event.type === "error";
}

function reset() {
  result = null;
  player.clear();
  redraw();
  useRate();
  const k = wanted.num_draft_tokens;
  const title = k === "auto" ? "K chosen each round" : `K = ${k}`;
  const accuracy = wanted.accuracy < 1 ? `, ${Math.round(100 * wanted.accuracy)}% accuracy` : "";
  byId("speculative-title").textContent = `Speculative: ${wanted.method}, ${title}${accuracy}`;
}

function redraw() {
  counts = {};
  for (const lane of LANES) lanes[lane].clear(wanted.prompt, wanted.max_tokens);
  inspector.clear();
  verdict.textContent = "";
  for (const cell of document.querySelectorAll("[data-figure]")) cell.textContent = "–";
  for (const part of document.querySelectorAll(".chart, #equation")) part.replaceChildren(); // a race may draw none
}

function showRound(name, round) {
  lanes[name].show(round);
  if (name !== "speculative" || round.is_prefill) return;
  counts[round.tokens.length] = (counts[round.tokens.length] ?? 0) + 1;
  drawFigures(round.figures);
}

function drawFigures(figures) {
  const shown = {
    alpha: figures.alpha === null ? "–" : `${Math.round(100 * figures.alpha)}%`,
    tau: figures.tau?.toFixed(2) ?? "–",
    cost_ratio: figures.cost_ratio?.toFixed(2) ?? "–",
    speedup: times(figures.speedup),
    expected: times(figures.expected),
  };
  for (const [name, value] of Object.entries(shown)) document.querySelector(`[data-figure=${name}]`).textContent = value;
  const k = wanted.num_draft_tokens;
  const longest = Math.max(k === "auto" ? 8 : k, Math.ceil(figures.mean_k), 1);
  histogram(document.querySelector("#passes .chart"), counts, longest + 1);
  if (figures.alpha === null || figures.cost_ratio === null) return;
  curve(document.querySelector("#formula .chart"), figures, Math.max(8, longest + 2));
  byId("equation").innerHTML = equation(figures);
}

const times = (value) => (value ? `${value.toFixed(2)}×` : "–");

/** For numbers only: text of visitors must not be passed here. */
function equation({ alpha, mean_k: k, cost_ratio: c, expected }) {
  const [a, n, most] = [alpha.toFixed(2), Number(k.toFixed(1)), Number((k + 1).toFixed(1))];
  const names = `<mi>K</mi><mi>c</mi><mo>+</mo><mn>1</mn>`;
  const costs = `<mn>${n}</mn><mo>·</mo><mn>${c.toFixed(2)}</mn><mo>+</mo><mn>1</mn>`;
  const sides =
    a === "1.00" // the general formula would show 0 / 0
      ? [fraction("<mi>K</mi><mo>+</mo><mn>1</mn>", names), fraction(`<mn>${most}</mn>`, costs)]
      : [
          fraction(
            `<mn>1</mn><mo>−</mo><msup><mi>α</mi><mrow><mi>K</mi><mo>+</mo><mn>1</mn></mrow></msup>`,
            `<mo>(</mo><mn>1</mn><mo>−</mo><mi>α</mi><mo>)</mo><mo>(</mo>${names}<mo>)</mo>`,
          ),
          fraction(
            `<mn>1</mn><mo>−</mo><msup><mn>${a}</mn><mn>${most}</mn></msup>`,
            `<mn>${(1 - alpha).toFixed(2)}</mn><mo>·</mo><mo>(</mo>${costs}<mo>)</mo>`,
          ),
        ];
  return `<math display="block">${sides.join("<mo>=</mo>")}<mo>=</mo><mn>${expected.toFixed(2)}</mn></math>`;
}

const fraction = (top, bottom) => `<mfrac><mrow>${top}</mrow><mrow>${bottom}</mrow></mfrac>`;

function tick(time) {
  for (const lane of LANES) {
    const { rounds, ended } = player.lanes[lane];
    const last = rounds.at(-1)?.clock ?? 0;
    lanes[lane].time(ended ? Math.min(time, last) : Math.min(time, player.length));
  }
  byId("skip").disabled = player.isOver;
}

function finished() {
  byId("replay").disabled = !player.length;
  byId("skip").disabled = true;
  if (!result) return;
  lanes.plain.field("tok_s", result.plain_tok_s ? speed(result.plain_tok_s) : "–");
  drawFigures(result.figures);
  verdict.replaceChildren(...judgement());
}

function judgement() {
  const { speedup } = result.figures;
  const parts = [];
  if (speedup) parts.push(speedup >= 1.005 ? `${speedup.toFixed(2)}× as fast.` : `${speedup.toFixed(2)}× the speed of plain decoding.`);
  const small = element("small");
  const same = result.first_difference === null;
  if (offer.lossless && (wanted.temperature === 0 || offer.same_text)) {
    small.textContent = same
      ? "The same text, token for token."
      : `The texts differ from token ${result.first_difference + 1} on, most likely because two logits are almost equal; check with outrider audit.`;
  } else if (!offer.lossless) {
    small.textContent = "This verifier is lossy: the text does not follow the target’s distribution.";
  } else {
    small.textContent = same ? "Both samples are equal." : "Two samples from the same distribution.";
  }
  if (result.faults) small.textContent += " The drafting method failed in some rounds, which continued without drafts.";
  if (Object.values(result.reasons).includes("time")) small.textContent += " The race reached its time limit.";
  return [parts.join(" "), " ", small];
}

function inspect(lane, at) {
  for (const other of LANES) if (lanes[other] !== lane) lanes[other].unselect();
  inspector.show(lane.tokens[at].token, wanted.temperature, offer.same_text);
}

function setBusy(isBusy) {
  byId("start").disabled = isBusy;
  byId("stop").hidden = !isBusy;
}

function say(text, isError = false) {
  status.textContent = text;
  status.classList.toggle("error", isError);
}

form.addEventListener("input", describeForm);
form.addEventListener("submit", start);
byId("length").addEventListener("change", chooseRate);
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("rate").addEventListener("change", useRate);
byId("replay").addEventListener("click", () => {
  redraw();
  player.replay();
});
byId("skip").addEventListener("click", () => player.skip());
byId("guesses").addEventListener("change", (event) => document.body.classList.toggle("hide-guesses", !event.target.checked));

try {
  offer = await about();
  fillForm();
} catch {
  say("The server does not answer. Is outrider demo still running?", true);
  byId("start").disabled = true;
}
