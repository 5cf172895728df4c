// @ts-check
// A run of training in the worker: what training/run.py, schedule.py and material.py do on the command line, around the
// same training step. It uses no DOM, so it runs in node.
import { expectedTensors } from "./checkpoint.js";
import * as facts from "./facts.js";
import { Kernels, Refused } from "./kernels.js";
import { writeSafetensors } from "./safetensors.js";
import { CpuDecoder, Writer } from "./writer.js";

const SAMPLE = { length: 240, seed: 1337, sampling: { temperature: 0.8 }, every: 4 }; // characters, seconds
const EVALUATING = 0.08; // share of the time that evaluations may take: the command line's is less, and plots nothing

/**
 * Windows of a held-out text as evaluate() in model/loss.py reads them; material.py calls them windows(), too.
 * @param {Uint16Array} ids
 * @param {number} T tokens that a window predicts
 * @param {number} limit of a longer text, evenly spaced windows are taken
 */
export function windows(ids, T, limit) {
  const last = ids.length - 1,
    all = ids.length <= limit ? Math.ceil(last / T) : Math.floor(last / T),
    count = ids.length <= limit ? all : Math.max(1, Math.min(all, Math.floor(limit / T))),
    step = Math.fround((all - 1) / Math.max(1, count - 1)); // torch.linspace() has float32
  return Array.from({ length: count }, (_, i) => {
    const place = i < count / 2 ? Math.fround(step * i) : Math.fround(all - 1 - Math.fround(step * (count - 1 - i))),
      start = (count < all ? Math.round(place) : i) * T;
    return ids.subarray(start, start + T + 1);
  });
}

/** The progress of a run: by training steps, or by time if the recipe has minutes. */
class Schedule {
  done = 0;
  seconds = 0; // of work: a pause takes none
  stepSeconds = 0;
  finishing = 0; // seconds of the work after the last training step
  evaluating = 0; // seconds of all evaluations

  constructor(recipe) {
    this.recipe = recipe;
    this.budget = 60 * (recipe.minutes ?? 0);
    this.wait = this.next = Math.min(this.budget / facts.EVALUATIONS, facts.LONGEST_WAIT);
  }

  begin() { this.lap = performance.now(); }

  /** Counts the time since the last call of this or of begin(); returns it. */
  count() {
    const before = this.lap;
    this.begin();
    const seconds = (this.lap - before) / 1e3;
    this.seconds += seconds;
    return seconds;
  }

  stepped() {
    const seconds = this.count();
    this.done++;
    this.stepSeconds += (this.stepSeconds ? 0.1 : 1) * (seconds - this.stepSeconds);
  }

  evaluated() {
    const seconds = this.count();
    this.evaluating += seconds;
    this.next = Math.max(this.seconds + this.wait, (this.evaluating + seconds) / EVALUATING);
    return seconds;
  }

  get trainingSeconds() { return Math.max(0.5 * this.budget, this.budget - this.finishing); }

  get progress() {
    return this.budget ? Math.min(1, this.seconds / this.trainingSeconds) : this.done / this.recipe.steps;
  }

  /** The next training step's share of the peak learning rates; the recipe's decay is linear. */
  get rate() {
    const { warmup, steps } = this.recipe;
    if (this.budget) {
      const warm = Math.max((this.done + 1) / Math.max(1, warmup), this.progress / 0.1);
      return Math.min(1, warm) * (1 - this.progress);
    }
    const short = Math.min(warmup, Math.max(1, Math.floor(steps / 10)));
    if (this.done < short) return (this.done + 1) / short;
    return 1 - Math.min(1, (this.done - short) / Math.max(1, steps - short));
  }

  get isDue() {
    if (this.budget) return this.seconds >= this.next && !this.isEnd;
    return this.done % this.recipe.eval_every === 0 || this.isEnd;
  }

  get isEnd() {
    if (!this.budget) return this.done >= this.recipe.steps;
    return this.done > 0 && this.seconds + 0.5 * this.stepSeconds >= this.trainingSeconds;
  }

  get left() {
    if (this.budget) return Math.max(0, this.budget - this.seconds);
    return (this.seconds / Math.max(1, this.done)) * (this.recipe.steps - this.done);
  }
}

export class Training {
  best = { loss: Infinity, floats: new Float32Array(0) };
  losses = [0, 0]; // sum and number of the training losses since the last evaluation
  evaluatedAt = -1; // training steps
  sampledAt = 0; // seconds

  /**
   * @param {{module: WebAssembly.Module, text: string, recipe: object}} request recipe: changes of the one for an own
   *   text. The page has checked them, and that the text's characters are UTF-16 units.
   */
  static async of({ module, text, recipe }) {
    const kernels = await Kernels.of(module);
    return new Training(kernels, text, { ...facts.RECIPE, ...recipe });
  }

  constructor(kernels, text, wanted) {
    const cut = Math.floor(0.9 * text.length),
      block_size = Math.min(wanted.block_size, Math.floor((text.length - cut) / 4 / 8) * 8),
      recipe = { ...wanted, block_size, batch_chars: Math.min(wanted.batch_chars, cut) },
      { n_layer, n_head, n_embd, seed } = recipe,
      batch = Math.max(1, Math.floor(recipe.batch_chars / block_size));
    this.characters = [...new Set(text)].sort();
    const known = new Map(this.characters.map((c, i) => [c.charCodeAt(0), i])),
      ids = Uint16Array.from({ length: text.length }, (_, i) => known.get(text.charCodeAt(i)) ?? 0),
      heldOut = ids.subarray(cut),
      end = heldOut.length - Math.floor(recipe.test_share * text.length),
      [validation, test] = [heldOut.subarray(0, end), heldOut.subarray(end)],
      vocab_size = this.characters.length;
    this.kernels = kernels;
    this.recipe = recipe;
    this.batch = batch;
    this.ids = ids.subarray(0, cut);
    this.config = { block_size, vocab_size, n_layer, n_head, n_embd, dropout: 0, bias: false };
    this.watched = windows(validation, block_size, facts.MOST_WATCHED);
    this.validation = windows(validation, block_size, facts.MOST_EVALUATED);
    this.test = windows(test, block_size, facts.MOST_EVALUATED);
    this.schedule = new Schedule(recipe);
    this.record = { characters: text.length, recipe, device: "a browser", curve: [] };
    const settings = Float64Array.from(Object.values(facts.OPTIMIZER).flat()),
      sizes = [batch, block_size, vocab_size, n_embd, n_head, n_layer, ...facts.TILE];
    this.at = kernels.call("open_training", ...sizes, BigInt(seed), settings);
    this.place = kernels.call("training_place", this.at);
  }

  /** Trains for some milliseconds, or to the end if it is to stop. */
  async more({ ms, stops = false }) {
    const { schedule } = this,
      { done } = schedule,
      until = performance.now() + ms;
    let sum = 0;
    schedule.begin();
    while (!stops && !schedule.isEnd && performance.now() < until) {
      sum += this.step();
      if (schedule.isDue) this.evaluate();
    }
    const isEnd = stops || schedule.isEnd;
    if (isEnd) this.end();
    const isSampled = isEnd || schedule.seconds >= this.sampledAt + SAMPLE.every;
    const sample = isSampled ? await this.sample() : undefined;
    return { ...this.state(), loss: sum / (schedule.done - done), isEnd, sample };
  }

  state() {
    const { done, seconds, left, progress } = this.schedule,
      { curve, val_loss, test_loss } = this.record;
    return {
      ...{ done, seconds, left, curve, val_loss, test_loss, characters: this.characters },
      steps: progress ? Math.max(done, Math.round(done / progress)) : this.recipe.steps,
      speed: (done * this.batch * this.config.block_size) / Math.max(seconds, 1e-9),
      memory: this.kernels.c.memory.buffer.byteLength,
    };
  }

  /** Returns the loss before the step. */
  step() {
    const { recipe, ids, schedule, config } = this,
      { block_size: T } = config,
      tokens = new Int32Array(this.batch * (T + 1)),
      placeOf = (i) => (this.place + facts.GOLDEN * i) % 1,
      { average, covered } = recipe,
      decay = Math.min(average, 1 - 1 / Math.max(1, covered * schedule.done));
    for (let i = 0; i < this.batch; i++) {
      const start = Math.floor(placeOf(i) * (ids.length - T));
      tokens.set(ids.subarray(start, start + T + 1), i * (T + 1));
    }
    this.place = placeOf(this.batch);
    const rates = [Math.fround(schedule.rate), Math.fround(decay)],
      loss = this.kernels.call("training_step", this.at, tokens, ...rates);
    if (!Number.isFinite(loss)) throw new Refused("the training loss became infinite: the training diverged");
    this.losses[0] += loss;
    this.losses[1]++;
    schedule.stepped();
    if (this.evaluatedAt < 0) this.reserve(schedule.stepSeconds / 2 / (this.batch * T));
    return loss;
  }

  /** The mean loss of the averages on windows, of which only the last may be shorter. */
  lossOn(held) {
    let [sum, predicted] = [0, 0];
    for (let i = 0; i < held.length; i += this.batch) {
      const some = held.slice(i, i + this.batch),
        tokens = Int32Array.from(some.flatMap((ids) => [...ids])),
        rows = tokens.length - some.length;
      sum += this.kernels.call("training_loss", this.at, tokens, tokens.length, rows);
      predicted += rows;
    }
    return sum / predicted;
  }

  /** Adds a row to the curve, once for each training step, and keeps the averages if they are the best. */
  evaluate() {
    const { schedule, record } = this,
      { done } = schedule;
    if (this.evaluatedAt === done) return;
    schedule.count();
    const loss = this.lossOn(this.watched),
      seconds = schedule.evaluated(),
      [sum, count] = this.losses;
    this.reserve(seconds / characters(this.watched));
    record.curve.push([done, count ? rounded(sum / count) : null, rounded(loss)]);
    this.losses = [0, 0];
    this.evaluatedAt = done;
    if (!(loss < this.best.loss)) return;
    this.best = { loss, floats: this.averages().slice() };
    Object.assign(record, { val_loss: loss, best_step: done, seconds_to_best: Math.round(schedule.seconds) });
  }

  /** Tells the schedule how long the end of the run will take. */
  reserve(perCharacter) {
    const parts = [this.watched, this.validation, this.test];
    this.schedule.finishing = facts.MARGIN * perCharacter * parts.reduce((sum, part) => sum + characters(part), 0) + 0.1;
  }

  /** Measures the best weights on all held-out text. */
  end() {
    const { schedule, record } = this;
    this.evaluate();
    this.averages().set(this.best.floats);
    record.val_loss = this.lossOn(this.validation);
    record.test_loss = this.lossOn(this.test);
    schedule.count();
    const { done, seconds } = schedule,
      speed = Math.round((done * this.batch * this.config.block_size) / seconds);
    Object.assign(record, { steps: done, seconds: Number(seconds.toFixed(1)), characters_per_second: speed });
  }

  averages() {
    const { kernels } = this;
    return kernels.view(Float32Array, kernels.call("averages", this.at), kernels.call("parameters", this.at));
  }

  /** The averages as a checkpoint's tensors. */
  tensors() {
    const floats = this.averages().slice();
    let end = 0;
    const tensors = new Map();
    for (const [name, shape] of expectedTensors({ ...this.config, window: null })) {
      const begin = end;
      end += [...shape].reduce((product, n) => product * Number(n), 1);
      tensors.set(name, { shape, data: floats.subarray(begin, end) });
    }
    return tensors;
  }

  /** A text by the averages, always from the same random numbers. */
  async sample() {
    const { kernels, config, characters } = this,
      { block_size: capacity, vocab_size } = config,
      checkpoint = kernels.openCheckpoint({ config, tensors: this.tensors() }),
      sizes = [facts.PRECISIONS.indexOf("fp32"), kernels.part("part4"), ...facts.TILE, capacity],
      at = kernels.call("open_decoder", checkpoint, ...sizes),
      request = { ids: [0], context: "reset", useCache: true, capacity, ends: [] },
      writer = new Writer(new CpuDecoder(kernels, at, vocab_size, SAMPLE), request);
    let text = "";
    while (text.length < SAMPLE.length) {
      const { tokens } = await writer.write(SAMPLE.length - text.length);
      text += tokens.map((token) => characters[token]).join("");
    }
    kernels.call("close_decoder", at);
    kernels.call("close_checkpoint", checkpoint);
    this.schedule.count();
    this.sampledAt = this.schedule.seconds;
    return text;
  }

  /** The files of a checkpoint, by name, each a Uint8Array. After the end. */
  files() {
    const json = (value) => new TextEncoder().encode(`${JSON.stringify(value)}\n`);
    return {
      "model.safetensors": writeSafetensors(this.tensors()),
      "config.json": json(this.config),
      "meta.json": json({ characters: this.characters }),
      "training.json": json(this.record),
    };
  }
}

const characters = (held) => held.reduce((sum, { length }) => sum + length, 0);
const rounded = (loss) => Number(loss.toFixed(4));
