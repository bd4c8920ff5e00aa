// Play, pause, step and scrub: one position that both stages follow.

const STEP_MS = 520;

class Player {
  /** `moved(position)` draws; `rested()` is called when nothing moves any more. */
  constructor(controls, moved, rested) {
    Object.assign(this, { controls, moved, rested, stops: [0], position: 0, playing: false });
    const { scrub, play, back, next } = controls;
    scrub.addEventListener("input", () => this.seek(Number(scrub.value)));
    scrub.addEventListener("change", () => this.rested());
    play.addEventListener("click", () => this.toggle());
    back.addEventListener("click", () => this.step(-1));
    next.addEventListener("click", () => this.step(1));
  }

  get end() {
    return this.stops.at(-1);
  }

  get calm() {
    return matchMedia("(prefers-reduced-motion: reduce)").matches;
  }

  /** New stops, ascending from 0; the position is kept inside. */
  load(stops, position) {
    this.stops = stops;
    set(this.controls.scrub, { max: this.end || 1 });
    this.controls.scrub.disabled = !this.end;
    this.seek(Math.min(position, this.end));
  }

  seek(position) {
    cancelAnimationFrame(this.frame);
    this.show(false);
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
    if (this.playing) return this.jump(this.position);
    if (this.position >= this.end) this.move(0);
    const whole = clamp(1.15 * (this.stops.length - 1), 2.5, 30) * 1000;
    this.glide(this.end, whole * (1 - this.position / (this.end || 1)));
    this.show(true);
  }

  step(direction) {
    const later = this.stops.find((found) => found > this.position + 1e-9);
    const stop = direction > 0 ? later : this.stops.findLast((found) => found < this.position - 1e-9);
    this.seek(this.position);
    if (stop === undefined) this.rested();
    else if (this.calm || direction < 0) this.jump(stop);
    else this.glide(stop, STEP_MS);
  }

  /** Less motion, if it is asked for: from stop to stop, with nothing between. */
  glide(target, milliseconds) {
    const [from, start, calm] = [this.position, performance.now(), this.calm];
    const tick = (now) => {
      const part = milliseconds > 0 ? clamp((now - start) / milliseconds, 0, 1) : 1;
      const position = part === 1 ? target : from + (target - from) * part;
      this.move(calm ? this.stops.findLast((stop) => stop <= position) : position);
      if (part < 1) this.frame = requestAnimationFrame(tick);
      else this.jump(target);
    };
    this.frame = requestAnimationFrame(tick);
  }

  show(playing) {
    this.playing = playing;
    this.controls.play.setAttribute("aria-label", playing ? "Pause" : "Play");
    this.controls.play.textContent = playing ? "❚❚" : "▶";
  }
}
