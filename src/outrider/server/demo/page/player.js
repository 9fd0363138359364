// Plays rounds back at the times of their lanes' clocks. Independent of the page.

export const LANES = ["plain", "speculative"];

export class Player {
  /** `show(lane, round)` draws a round; `tick(time)` runs each frame; `end()` runs after `finish`, once everything is shown. */
  constructor(show, tick, end) {
    Object.assign(this, { show, tick, end });
    this.rate = 1; // seconds of the race per second of playback
    this.clear();
  }

  clear() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    this.lanes = Object.fromEntries(LANES.map((lane) => [lane, { rounds: [], shown: 0, ended: false }]));
    this.time = 0;
    this.isFinished = false;
    this.isOver = false;
  }

  add(round) {
    this.lanes[round.lane].rounds.push(round);
    if (round.finish_reason) this.lanes[round.lane].ended = true;
    this.#wake();
  }

  /** Signal that all rounds have been added. */
  finish() {
    for (const lane of LANES) this.lanes[lane].ended = true;
    this.isFinished = true;
    this.#wake();
  }

  replay() {
    this.time = 0;
    this.isOver = false;
    for (const lane of LANES) this.lanes[lane].shown = 0;
    this.#wake();
  }

  skip() {
    this.time = Infinity;
    this.#wake();
  }

  /** Return the time up to which the rounds of every lane have arrived. */
  get horizon() {
    const known = LANES.filter((lane) => !this.lanes[lane].ended).map((lane) => this.#clock(lane));
    return known.length ? Math.min(...known) : Infinity;
  }

  /** Return the finish time of the slowest lane so far. */
  get length() {
    return Math.max(...LANES.map((lane) => this.#clock(lane)));
  }

  #clock(lane) {
    return this.lanes[lane].rounds.at(-1)?.clock ?? 0;
  }

  #wake() {
    if (this.frame !== null || this.isOver) return;
    this.last = performance.now();
    this.frame = requestAnimationFrame((now) => this.#play(now));
  }

  #play(now) {
    this.frame = null;
    const passed = this.rate === Infinity ? Infinity : (Math.max(now - this.last, 0) / 1000) * this.rate;
    this.time = Math.min(this.time + passed, this.horizon, this.length);
    for (const lane of LANES) {
      const { rounds } = this.lanes[lane];
      while (this.lanes[lane].shown < rounds.length && rounds[this.lanes[lane].shown].clock <= this.time) {
        this.show(lane, rounds[this.lanes[lane].shown++]);
      }
    }
    this.tick(this.time);
    const allShown = LANES.every((lane) => this.lanes[lane].ended && this.lanes[lane].shown === this.lanes[lane].rounds.length);
    if (allShown) {
      this.isOver = this.isFinished; // the last rounds may be shown before the race's final event arrives
      if (this.isOver) this.end();
      return;
    }
    this.last = now;
    this.frame = requestAnimationFrame((next) => this.#play(next));
  }
}
