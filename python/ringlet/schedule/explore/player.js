// Play, pause, step and scrub: one position that both stages follow.

const STEP_MS = 520;

class Player {
  /** `moved(position)` draws; `rested()` is called when nothing moves any more. */
  constructor(controls, moved, rested) {
    Object.assign(this, { controls, moved, rested, stops: [0], position: 0, playing: false, frame: 0 });
    const { scrub, play, first, back, next, last } = controls;
    scrub.addEventListener("input", () => this.seek(Number(scrub.value)));
    scrub.addEventListener("change", () => this.rested());
    play.addEventListener("click", () => this.toggle());
    first.addEventListener("click", () => this.jump(0));
    back.addEventListener("click", () => this.step(-1));
    next.addEventListener("click", () => this.step(1));
    last.addEventListener("click", () => this.jump(this.end));
  }

  get end() {
    return this.stops.at(-1);
  }

  calm() {
    return matchMedia("(prefers-reduced-motion: reduce)").matches;
  }

  /** New stops, ascending from 0; the position is kept inside. */
  load(stops, position) {
    this.stop();
    this.stops = stops;
    this.controls.scrub.max = this.end || 1;
    this.controls.scrub.disabled = !this.end;
    this.seek(Math.min(position, this.end));
  }

  seek(position) {
    this.stop();
    this.move(position);
  }

  jump(position) {
    this.seek(position);
    this.rested();
  }

  move(position) {
    this.position = position;
    this.controls.scrub.value = position;
    this.moved(position);
  }

  toggle() {
    if (this.playing) {
      this.stop();
      this.rested();
      return;
    }
    if (this.position >= this.end) this.move(0);
    const rounds = this.stops.length - 1;
    const whole = Math.min(30, Math.max(2.5, 1.15 * rounds)) * 1000;
    if (this.calm()) this.playInSteps(whole / Math.max(rounds, 1));
    else this.glide(this.end, whole * (1 - this.position / (this.end || 1)));
    this.show(true);
  }

  playInSteps(pause) {
    const next = () => {
      const stop = this.stops.find((found) => found > this.position + 1e-9);
      if (stop === undefined) return this.finish();
      this.move(stop);
      this.timer = setTimeout(next, pause);
    };
    this.timer = setTimeout(next, pause / 2);
  }

  step(direction) {
    this.stop();
    const stops = direction > 0 ? this.stops.filter((stop) => stop > this.position + 1e-9) : this.stops.filter((stop) => stop < this.position - 1e-9).reverse();
    if (!stops.length) return this.rested();
    if (this.calm() || direction < 0) return this.jump(stops[0]);
    this.glide(stops[0], STEP_MS);
  }

  glide(target, milliseconds) {
    const from = this.position;
    const start = performance.now();
    const tick = (now) => {
      const part = milliseconds > 0 ? Math.min(1, Math.max(0, (now - start) / milliseconds)) : 1;
      this.move(part === 1 ? target : from + (target - from) * part);
      if (part < 1) this.frame = requestAnimationFrame(tick);
      else this.finish();
    };
    this.frame = requestAnimationFrame(tick);
  }

  finish() {
    this.frame = 0;
    this.show(false);
    this.rested();
  }

  stop() {
    cancelAnimationFrame(this.frame);
    clearTimeout(this.timer);
    this.show(false);
  }

  show(playing) {
    this.playing = playing;
    this.controls.play.setAttribute("aria-label", playing ? "Pause" : "Play");
    this.controls.play.classList.toggle("playing", playing);
  }
}
