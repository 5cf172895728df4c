// @ts-check
// The view Train: a worker learns the reader's text, with a plot of the losses and samples.
import { $, bytes, make, number, on, onSubmit, say } from "./dom.js";
import { Engine } from "./engine.js";
import { SHORTEST } from "./facts.js";
import { text as fileText } from "./files.js";
import { module } from "./models.js";
import { Plot } from "./plot.js";
import { zipped } from "./zip.js";

const MOST = 5_000_000; // characters, and bytes of a file
const HEAD = 32; // width of a head
const BATCH = 1024; // characters of a training step
const CHUNK_MS = 400; // of training between two pictures
const NAME = "trained"; // of the folder in the .zip
const EDGES = { left: 44, right: 630, top: 12, bottom: 266 };

export class TrainView {
  constructor(page) {
    this.page = page;
    this.file = null; // {name, text} in place of the field's text
    onSubmit("train-form", () => this.run());
    on("corpus", "input", () => this.take(null));
    on("corpus-file", "change", () => this.open($("corpus-file").files[0]).catch((error) => page.problem(error)));
    on("sonnets", "click", async () => {
      $("corpus").value = await fileText("sonnets.txt");
      this.take(null);
    });
    on("train-pause", "click", () => this.pause(!this.goOn));
    on("train-stop", "click", () => {
      this.stops = true;
      this.pause(false);
    });
    on("train", "change", () => this.show());
    on("train-use", "click", () => this.use());
    on("train-save", "click", async () => {
      const link = make("a", { href: URL.createObjectURL(await zipped(NAME, this.files)), download: `${NAME}.zip` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    });
    this.take(null);
  }

  show() { say("train-command", command(this.page.choices)); }

  /** @param {{name: string, text: string} | null} file in place of the field */
  take(file) {
    this.file = file;
    const bounds = `${number(SHORTEST)} to ${number(MOST)} characters`;
    say("corpus-note", file ? `${file.name} has ${number(file.text.length)} characters.` : `It must have ${bounds}.`);
  }

  /** @param {File | undefined} file */
  async open(file) {
    if (!file) return this.take(null);
    this.page.problem(null);
    try {
      if (file.size > MOST) throw new Error(`${file.name} has ${bytes(file.size)}; it must have at most ${bytes(MOST)}`);
      this.take({ name: file.name, text: decoded(await file.arrayBuffer(), file.name) });
    } catch (error) {
      $("corpus-file").value = "";
      this.take(null);
      throw error;
    }
  }

  pause(isOn) {
    this.goOn?.();
    this.goOn = null;
    if (isOn) this.paused = new Promise((done) => { this.goOn = done; });
    say("train-pause", isOn ? "Go on" : "Pause");
    if (isOn) say("train-status", `Paused. ${$("train-status").textContent}`);
  }

  showRunning(isRunning) {
    $("train-start").disabled = isRunning;
    $("train-pause").disabled = $("train-stop").disabled = !isRunning;
    $("train-use").disabled = $("train-save").disabled = isRunning || !this.files;
    $("train-status").ariaBusy = String(isRunning); // a screen reader reads the status at the end only
  }

  /** The text to learn; null if the page has said why it does not do. */
  text() {
    try {
      this.page.problem(null);
      return checked(this.file?.text ?? $("corpus").value);
    } catch (error) {
      this.page.problem(error);
      return null;
    }
  }

  async run() {
    const { page } = this,
      recipe = recipeOf(page.choices),
      text = this.text();
    if (text === null) return;
    this.files = this.goOn = null;
    this.stops = false;
    this.points = []; // [training step, training loss]
    page.text?.halt(); // a text would slow the training
    this.showRunning(true);
    say("train-status", "Starting …");
    const engine = Engine.open();
    try {
      let state = await engine.call("openTraining", { module: await module, text, recipe });
      while (!state.isEnd) {
        await this.paused;
        state = await engine.call("moreTraining", { ms: CHUNK_MS, stops: this.stops });
        this.draw(state);
      }
      this.characters = state.characters;
      this.files = await engine.call("trained");
    } catch (error) {
      say("train-status", "");
      page.problem(error);
    }
    engine.close(); // its memory is free
    this.pause(false);
    this.showRunning(false);
  }

  /** The trained model becomes that of the other views. */
  async use() {
    const files = Object.entries(this.files).map(([name, content]) => new File([content], name)),
      prompt = $("prompt");
    if ([...prompt.value].some((c) => !this.characters.includes(c))) prompt.value = this.characters[0];
    location.hash = "#write";
    await this.page.openFiles(files);
  }

  draw(state) {
    const { done, steps, seconds, left, speed, curve, memory, loss, sample, isEnd, val_loss, test_loss } = state,
      [, , last = NaN] = curve.at(-1) ?? [];
    if (Number.isFinite(loss)) this.points.push([done, loss]);
    const [, trained = NaN] = this.points.at(-1) ?? [];
    const rest = `${number(speed)} characters a second, ${bytes(memory)} of memory`;
    if (isEnd) {
      const losses = `loss ${val_loss.toFixed(3)} on the validation text, ${test_loss.toFixed(3)} on the test text`;
      say("train-status", `${number(done)} training steps in ${number(seconds)} s: ${losses}; ${rest}.`);
    } else if (!this.goOn) {
      say("train-status", `Training step ${number(done)} of about ${number(steps)}, ${number(left)} s left; ${rest}.`);
    }
    if (sample !== undefined) say("sample", sample);
    const held = Number.isNaN(last) ? "not yet measured" : `${last.toFixed(3)} (step ${number(curve.at(-1)[0])})`;
    say("losses-text", `After ${number(done)} training steps: training loss ${trained.toFixed(3)}, on the held-out text ${held}.`);
    this.plot(steps, curve.map(([step, , value]) => [step, value]));
  }

  /** @param {number} steps at the right edge  @param {number[][]} held points of the other line */
  plot(steps, held) {
    const values = [...this.points, ...held].map(([, value]) => value),
      least = Math.floor(2 * Math.min(...values)) / 2,
      most = Math.max(least + 0.5, Math.ceil(2 * Math.max(...values)) / 2),
      plot = new Plot("losses", EDGES, [0, Math.max(1, steps)], [least, most]);
    for (let value = least; value <= most; value += 0.5) plot.markY(value, value.toFixed(1));
    plot.text(`${number(steps)} training steps`, EDGES.right, EDGES.bottom + 22, "end");
    plot.line("training", this.points);
    plot.line("held", held);
    for (const [step, value] of held) plot.add("circle", { cx: plot.x(step), cy: plot.y(value), r: 3.5 });
  }
}

// What the choices change of the recipe for an own text.
function recipeOf({ width, layers, block, budget, trainseed }) {
  const count = parseInt(budget, 10),
    size = { n_embd: width, n_head: width / HEAD, n_layer: layers, block_size: block, batch_chars: BATCH, seed: trainseed };
  if (budget.endsWith("min")) return { ...size, minutes: count, steps: 0 };
  return { ...size, minutes: null, steps: count, eval_every: Math.ceil(count / 20) };
}

function command(choices) {
  const { n_embd, n_head, n_layer, block_size, seed, minutes, steps } = recipeOf(choices),
    length = minutes ? `--minutes ${minutes}` : `--steps ${steps}`,
    sizes = `--n-embd ${n_embd} --n-head ${n_head} --n-layer ${n_layer} --block-size ${block_size} --batch-chars ${BATCH}`;
  return `python gpt.py train ${NAME} --corpus text.txt ${length} ${sizes} --seed ${seed}`;
}

function decoded(content, name) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(content);
  } catch {
    throw new Error(`${name} is binary or not UTF-8; it must be text in UTF-8`);
  }
}

/**
 * A text as the command line reads it. Raises Error with a sentence.
 * @param {string} given
 */
function checked(given) {
  const text = given.replace(/\r\n?/g, "\n").replaceAll("\ufeff", ""),
    { length } = text,
    [other] = /[\ud800-\udfff]+/.exec(text) ?? [];
  if (text.includes("\0")) throw new Error("the text holds a NUL: it is binary; it must be text");
  if (length < SHORTEST || length > MOST)
    throw new Error(`the text has ${number(length)} characters; it must have ${number(SHORTEST)} to ${number(MOST)}`);
  if (other) throw new Error(`the text has ${other}; the page takes characters up to U+FFFF only`);
  return text;
}
