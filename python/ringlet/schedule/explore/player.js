// Play, pause, step and scrub: one position, in rounds, that both stages follow.

const STEP_MS = 520;
const isCalm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

class Player {
  /** `moved(position)` draws; `rested()` is called when nothing moves any more. */
  constructor(controls, moved, rested) {
    Object.assign(this, { controls, moved, rested, end: 0, position: 0, playing: false });
    const { scrub, play, back, next } = controls;
    scrub.addEventListener("input", () => this.seek(Number(scrub.value)));
    scrub.addEventListener("change", () => this.rested());
    play.addEventListener("click", () => this.toggle());
    back.addEventListener("click", () => this.step(-1));
    next.addEventListener("click", () => this.step(1));
  }

  /** A new number of rounds; the position is kept inside. */
  load(end, position) {
    this.end = end;
    set(this.controls.scrub, { max: end || 1 });
    this.controls.scrub.disabled = !end;
    this.seek(Math.min(position, end));
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
    this.glide(this.end, clamp(1150 * this.end, 2500, 30000) * (1 - this.position / (this.end || 1)));
    this.show(true);
  }

  step(direction) {
    const stop = clamp(direction > 0 ? Math.floor(this.position + 1) : Math.ceil(this.position - 1), 0, this.end);
    this.seek(this.position);
    if (isCalm() || direction < 0) this.jump(stop);
    else this.glide(stop, STEP_MS);
  }

  /** Less motion, if it is asked for: from round to round, with nothing between. */
  glide(target, milliseconds) {
    const [from, start, calm] = [this.position, performance.now(), isCalm()];
    const tick = (now) => {
      const part = milliseconds > 0 ? clamp((now - start) / milliseconds, 0, 1) : 1;
      const position = part === 1 ? target : from + (target - from) * part;
      this.move(calm ? Math.floor(position) : position);
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
