// @ts-check
// The page: the choices, the model, the views.
import { $, say } from "./dom.js";
import { AttentionView } from "./attention.js";
import { Closed } from "./engine.js";
import { bind, format, parse } from "./choices.js";
import { paths } from "./files.js";
import { build } from "./kernels.js";
import { MeasureView } from "./measure.js";
import { openFiles, openModel } from "./models.js";
import { RaceView } from "./race.js";
import { openServer } from "./server.js";
import { TilesView } from "./tiles.js";
import { TrainView } from "./train.js";
import { WallView } from "./wall.js";
import { WriteView } from "./write.js";

const VIEWS = {
  ...{ write: WriteView, wall: WallView, race: RaceView, attention: AttentionView },
  ...{ tiles: TilesView, measure: MeasureView, train: TrainView },
};

class Page {
  /** @type {Record<string, any>} see state.js */ choices = {};
  /** @type {import("./engine.js").Engine | null} */ engine = null;
  /** @type {import("./text.js").Writing | null} */ text = null;
  /** @type {Record<string, any>} */ views;
  view = "write";
  own = false; // whether the checkpoint is the reader's

  async start() {
    say("build", `The kernels are the ${build() === "relaxed" ? "relaxed " : ""}SIMD build.`);
    this.server = await openServer();
    Object.assign(this.choices, this.follow());
    bind((changes) => this.choose(changes));
    this.views = Object.fromEntries(Object.entries(VIEWS).map(([name, View]) => [name, new View(this)]));
    this.views.write.fill();
    addEventListener("hashchange", () => this.moved());
    this.show();
    await this.views.write.write();
  }

  // Takes the view from the address; returns its choices.
  follow() {
    const { view, choices } = parse(location.hash);
    this.address = location.hash;
    this.view = view ?? this.view;
    return choices;
  }

  // After a link or the back button. Links of the page, and the one to #main, have no choices.
  moved() {
    const choices = this.follow(),
      isOther = JSON.stringify(choices) !== JSON.stringify(this.choices);
    if (location.hash.includes("?") && isOther) this.views.write.write(choices);
    return this.show();
  }

  show() {
    for (const [name, view] of Object.entries(this.views)) {
      const isHere = name === this.view,
        link = document.querySelector(`nav a[href="#${name}"]`);
      $(name).hidden = !isHere;
      link.ariaCurrent = isHere ? "page" : null;
      if (isHere) document.title = `${link.textContent} – ${$("title").textContent}`;
      else view.hide?.();
    }
    this.views[this.view].show?.();
    this.setAddress(); // at once: the link's address lacks the other choices
  }

  choose(changes) {
    Object.assign(this.choices, changes);
    this.remember();
  }

  // With a delay, because browsers limit how often an address may change. Where a link has changed it meanwhile,
  // moved() is about to be called.
  remember() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => location.hash === this.address && this.setAddress(), 300);
  }

  setAddress() {
    clearTimeout(this.timer);
    history.replaceState(null, "", format(this.view, this.choices));
    this.address = location.hash;
  }

  // Offers what can write with the model, else the CPU. gpu: {name, isCpu} or {why}; null until it is known.
  offerWriters(gpu = null) {
    const can = {
      browser: true,
      gpu: Boolean(gpu) && !gpu.why,
      server: !this.own && (this.server?.models.includes(this.choices.model) ?? false),
    };
    for (const option of $("where").options) {
      option.disabled = !can[option.value];
      option.hidden = option.value === "server" && !this.server;
    }
    if (!can[this.choices.where]) this.choices.where = "browser";
    if (!gpu) return;
    const slow = gpu.isCpu ? " A driver runs it on the CPU, so it is slow." : "";
    say("gpu-note", gpu.why ? `The GPU cannot write: ${gpu.why}.` : `The GPU is ${gpu.name}.${slow}`);
  }

  // The engine of the chosen model; null if it cannot be loaded, or if another was chosen meanwhile.
  async ready() {
    const { model, weights } = this.choices,
      wanted = `${model} ${weights}`;
    if (this.own) return this.engine;
    if (this.wanted !== wanted) {
      this.wanted = wanted;
      $("loading").hidden = false;
      this.loading = this.load(model, weights, () => this.wanted === wanted);
    }
    return this.loading;
  }

  async load(model, weights, isWanted) {
    try {
      const engine = await openModel(model, weights);
      if (isWanted()) return this.use(engine);
      engine.close();
    } catch (error) {
      if (!isWanted()) return null;
      this.wanted = null;
      $("loading").hidden = true;
      this.problem(error);
    }
    return null;
  }

  use(engine) {
    this.engine?.close();
    this.engine = engine;
    $("loading").hidden = true;
    return engine;
  }

  // A checkpoint from the reader's disk, until a model of the page is chosen.
  async openFiles(files) {
    try {
      const engine = await openFiles(files);
      Object.assign(this, { own: true, wanted: null });
      this.use(engine);
      await this.views.write.restart();
    } catch (error) {
      this.problem(error);
    }
  }

  // Runs a measurement of a view. Its button is disabled, and no text is written, which would slow it.
  async measured(view, button, work) {
    this.text?.halt();
    button.disabled = true;
    try {
      await work();
    } catch (error) {
      this.problem(error);
      say(`${view}-status`, "");
    }
    button.disabled = false;
  }

  written() {
    if (this.view !== "write") this.views[this.view].show?.();
    document.documentElement.dataset.written = String(this.text.written);
    this.keep();
  }

  // Lets the page open without a network; called after the first text, which needs the bandwidth. See sw.js.
  keep() {
    const workers = navigator.serviceWorker;
    if (this.server || !workers) return;
    // The first visit's weights and kernels came before the worker, which keeps what passes it.
    workers.oncontrollerchange = () => paths().forEach((path) => fetch(path));
    workers.register("sw.js").catch(() => {}); // without it the page needs the network each time
  }

  problem(error) {
    if (error instanceof Closed) return; // someone chose another model
    $("problem").hidden = !error;
    say("problem", error ? sentence(error.message) : "");
  }
}

const sentence = (text) => text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

const page = new Page();
addEventListener("unhandledrejection", (event) => event.reason instanceof Closed && event.preventDefault());
page.start().catch((error) => page.problem(error));
