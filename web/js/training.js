// @ts-check
// A run of training in the worker: what training/run.py, schedule.py and material.py do on the command line, around the
// same training step. It uses no DOM, so it runs in node.
import { shapes } from "./checkpoint.js";
import * as facts from "./facts.js";
import { Kernels } from "./kernels.js";
import { check } from "./problem.js";
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
    step = (all - 1) / Math.max(1, count - 1);
  return Array.from({ length: count }, (_, i) => {
    const start = Math.round(step * i) * T;
    return ids.subarray(start, start + T + 1);
  });
}

/** The progress of a run. By time the number of training steps is estimated again after each. */
class Schedule {
  done = 0;
  seconds = 0; // of work: a pause takes none
  finishing = 0; // seconds of the work after the last training step
  evaluating = 0; // seconds of all evaluations

  constructor(recipe) {
    this.recipe = recipe;
    this.budget = 60 * (recipe.minutes ?? 0);
    this.wait = this.next = Math.min(this.budget / facts.EVALUATIONS, facts.LONGEST_WAIT);
  }

  /** What work() gives, and the seconds that it took, which count. */
  async counted(work) {
    const start = performance.now(),
      result = await work(),
      seconds = (performance.now() - start) / 1e3;
    this.seconds += seconds;
    return [result, seconds];
  }

  evaluated(seconds) {
    this.evaluating += seconds;
    this.next = Math.max(this.seconds + this.wait, (this.evaluating + seconds) / EVALUATING);
  }

  /** All training steps; before the first one of a run by time nobody knows. */
  get steps() {
    if (!this.budget) return this.recipe.steps;
    const training = Math.max(0.5 * this.budget, this.budget - this.finishing); // seconds
    return this.done ? Math.round((this.done * training) / this.seconds) : Infinity;
  }

  /** The next training step's share of the peak learning rates; the recipe's decay is linear. */
  get rate() {
    const { done, steps } = this,
      warmup = Math.min(this.recipe.warmup, Math.max(1, Math.floor(steps / 10)));
    return done < warmup ? (done + 1) / warmup : 1 - (done - warmup) / Math.max(1, steps - warmup);
  }

  get isDue() {
    if (this.budget) return this.seconds >= this.next && !this.isEnd;
    return this.done % this.recipe.eval_every === 0 || this.isEnd;
  }

  get isEnd() { return this.done >= this.steps; }

  get left() { return ((this.steps - this.done) * this.seconds) / Math.max(1, this.done) + this.finishing; }
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
    const cut = Math.floor((1 - wanted.held_out) * text.length),
      block_size = Math.min(wanted.block_size, Math.floor((text.length - cut) / 4 / 8) * 8),
      recipe = { ...wanted, block_size, batch_chars: Math.min(wanted.batch_chars, cut) },
      { n_layer, n_head, n_embd, seed } = recipe;
    this.characters = [...new Set(text)].sort();
    const known = new Map(this.characters.map((c, i) => [c.charCodeAt(0), i])),
      ids = Uint16Array.from({ length: text.length }, (_, i) => known.get(text.charCodeAt(i)) ?? 0),
      end = ids.length - Math.floor(recipe.test_share * text.length),
      validation = ids.subarray(cut, end),
      vocab_size = this.characters.length;
    this.kernels = kernels;
    this.recipe = recipe;
    this.batch = Math.max(1, Math.floor(recipe.batch_chars / block_size));
    this.ids = ids.subarray(0, cut);
    this.config = { block_size, vocab_size, n_layer, n_head, n_embd, dropout: 0, bias: false };
    this.held = {
      watched: windows(validation, block_size, facts.MOST_WATCHED),
      validation: windows(validation, block_size, facts.MOST_EVALUATED),
      test: windows(ids.subarray(end), block_size, facts.MOST_EVALUATED),
    };
    this.schedule = new Schedule(recipe);
    this.record = { characters: text.length, recipe, device: "a browser", curve: [] };
    const settings = Float64Array.from(Object.values(facts.OPTIMIZER).flat()),
      sizes = [this.batch, block_size, vocab_size, n_embd, n_head, n_layer, ...facts.TILE];
    this.at = kernels.call("open_training", ...sizes, BigInt(seed), settings);
    this.place = kernels.call("training_place", this.at);
  }

  /** Trains for some milliseconds, or to the end if it is to stop. */
  async more({ ms, stops = false }) {
    const { schedule } = this,
      { done } = schedule,
      until = performance.now() + ms;
    let sum = 0;
    while (!stops && !schedule.isEnd && performance.now() < until) {
      sum += await this.step();
      if (schedule.isDue) await this.evaluate();
    }
    const isEnd = stops || schedule.isEnd;
    if (isEnd) await this.end();
    const isSampled = isEnd || schedule.seconds >= this.sampledAt + SAMPLE.every,
      sample = isSampled ? await this.sample() : undefined;
    return { ...this.state(), loss: sum / (schedule.done - done), isEnd, sample };
  }

  state() {
    const { done, seconds, left, steps } = this.schedule,
      { curve, val_loss, test_loss } = this.record;
    return {
      ...{ done, seconds, left, curve, val_loss, test_loss, characters: this.characters },
      ...{ steps: done && steps, speed: this.speed, memory: this.kernels.c.memory.buffer.byteLength },
    };
  }

  /** Characters per second of the whole time. */
  get speed() {
    const { done, seconds } = this.schedule;
    return (done * this.batch * this.config.block_size) / Math.max(seconds, 1e-9);
  }

  /** Returns the loss before the step. */
  async step() {
    const { recipe, ids, schedule, batch } = this,
      { block_size: T } = this.config,
      placeOf = (i) => (this.place + facts.GOLDEN * i) % 1,
      { average, covered } = recipe,
      decay = Math.min(average, 1 - 1 / Math.max(1, covered * schedule.done));
    const taken = Array.from({ length: batch }, (_, i) => {
      const start = Math.floor(placeOf(i) * (ids.length - T));
      return ids.subarray(start, start + T + 1);
    });
    this.place = placeOf(batch);
    const rates = [Math.fround(schedule.rate), Math.fround(decay)],
      [loss, seconds] = await schedule.counted(() => this.kernels.call("training_step", this.at, this.tokensOf(taken), ...rates));
    check(Number.isFinite(loss), "the training loss became infinite: the training diverged");
    this.losses[0] += loss;
    this.losses[1]++;
    schedule.done++;
    if (this.evaluatedAt < 0) this.reserve(seconds / 2 / (batch * T));
    return loss;
  }

  /** The tokens of a batch's windows, of which there may be fewer, or a shorter last one. */
  tokensOf(some) {
    const tokens = new BigInt64Array(this.batch * (this.config.block_size + 1));
    tokens.set(BigInt64Array.from(some.flatMap((ids) => [...ids]), BigInt));
    return tokens;
  }

  /** The mean loss of the averages on windows, of which only the last may be shorter, and the seconds that it took. */
  lossOn(held) {
    return this.schedule.counted(() => {
      let sum = 0;
      for (let i = 0; i < held.length; i += this.batch) {
        const some = held.slice(i, i + this.batch);
        sum += this.kernels.call("training_loss", this.at, this.tokensOf(some), characters(some) - some.length);
      }
      return sum / (characters(held) - held.length);
    });
  }

  /** Adds a row to the curve, once for each training step, and keeps the averages if they are the best. */
  async evaluate() {
    const { schedule, record, held } = this,
      { done } = schedule,
      [sum, count] = this.losses;
    if (this.evaluatedAt === done) return;
    const [loss, seconds] = await this.lossOn(held.watched);
    schedule.evaluated(seconds);
    this.reserve(seconds / characters(held.watched));
    record.curve.push([done, count ? rounded(sum / count) : null, rounded(loss)]);
    this.losses = [0, 0];
    this.evaluatedAt = done;
    if (!(loss < this.best.loss)) return;
    this.best = { loss, floats: this.averages().slice() };
    Object.assign(record, { val_loss: loss, best_step: done, seconds_to_best: Math.round(schedule.seconds) });
  }

  /** Tells the schedule how long the end of the run will take. */
  reserve(perCharacter) {
    this.schedule.finishing = facts.MARGIN * perCharacter * characters(Object.values(this.held).flat()) + 0.1;
  }

  /** Measures the best weights on all held-out text. */
  async end() {
    const { schedule, record, held } = this;
    await this.evaluate();
    this.averages().set(this.best.floats);
    [record.val_loss] = await this.lossOn(held.validation);
    [record.test_loss] = await this.lossOn(held.test);
    const { done, seconds } = schedule;
    Object.assign(record, { steps: done, seconds: Number(seconds.toFixed(1)), characters_per_second: Math.round(this.speed) });
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
    for (const [name, shape] of shapes({ ...this.config, window: null })) {
      const begin = end;
      end += shape.reduce((product, n) => product * n, 1);
      tensors.set(name, { shape, data: floats.subarray(begin, end) });
    }
    return tensors;
  }

  /** A text by the averages, always from the same random numbers. */
  async sample() {
    const [text] = await this.schedule.counted(() => this.written());
    this.sampledAt = this.schedule.seconds;
    return text;
  }

  async written() {
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
    return text;
  }

  /** The files of a checkpoint, by name, each a Blob. After the end. */
  files() {
    const json = (value) => new Blob([`${JSON.stringify(value)}\n`]);
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
