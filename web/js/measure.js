// @ts-check
// The view Measure: a roofline of one worker on this machine, after Williams, Waterman & Patterson 2009.
import { $, brief, bytes, make, number, on, say, tableRow } from "./dom.js";
import { PARTS, STEPS, TILE } from "./facts.js";
import { streams, traffic } from "./traffic.js";

const N = 1024,
  CALL = { heads: 4, N, d: 32 },
  FLOPS = 4 * CALL.heads * N * N * CALL.d; // of the two products
const BUFFERS = [16 << 10, 256 << 10, 64 << 20]; // in L1, in L2, in memory, on most machines
const L1 = 32 << 10;
const HEADS = ["part", "ms", "GFLOP/s", "of the peak", "bytes into 32 KB", "FLOP/byte", "scratch"];
const [LEFT, RIGHT, TOP, BOTTOM, HEIGHT] = [62, 624, 30, 352, 400]; // of the picture
const NEAR = 1.4; // bandwidths within this factor share a name

export class MeasureView {
  constructor(page) {
    on("measure-go", "click", ({ target }) => {
      if (page.engine) page.measured("measure", target, () => this.measure(page.engine));
    });
  }

  async measure(engine) {
    say("measure-status", "Multiply-adds …");
    const peak = await engine.call("peak", {}),
      [br, bc] = TILE,
      sizes = { Nq: N, Nk: N, d: CALL.d, heads: CALL.heads, br, bc, threads: 1, seen: N, ruled: 0 },
      call = { ...(await engine.call("block")), ...sizes },
      bandwidths = [],
      points = [];
    for (const size of BUFFERS) {
      say("measure-status", `Reads from ${bytes(size)} …`);
      bandwidths.push(await engine.call("bandwidth", { bytes: size }));
    }
    for (const { name: part } of PARTS) {
      say("measure-status", `${part} …`);
      const { milliseconds, scratch } = await engine.call("attention", { part, ...CALL });
      const counted = streams(part, call), // null for a part without counts
        moved = counted && traffic(counted, L1),
        speed = FLOPS / (milliseconds / 1e3);
      points.push({ part, milliseconds, speed, moved, scratch, intensity: FLOPS / moved });
    }
    this.draw(peak, bandwidths, points);
    const [gpu, onGpu] = await this.measureGpu(engine);
    this.table(peak, points, onGpu);
    const reads = BUFFERS.map((size, i) => `${brief(bandwidths[i] / 1e9)} GB/s from ${bytes(size)}`).join(", "),
      shape = `${CALL.heads} heads, N = ${number(N)}, d = ${CALL.d}, no mask`;
    say("measure-status", `One worker: ${brief(peak / 1e9)} GFLOP/s of multiply-adds; reads of ${reads}. ${shape}. ${gpu}`);
  }

  // Part 4's steps in WGSL: a sentence about the GPU, and a row for each.
  async measureGpu(engine) {
    const rows = [];
    let name, isCpu;
    for (const step of STEPS) {
      say("measure-status", `Step ${step} on the GPU …`);
      const call = await engine.callWithShaders("gpuAttention", { step, ...CALL }),
        { milliseconds: ms, isRight, why } = call;
      if (call.name) ({ name, isCpu } = call);
      if (why && !name) return [`The GPU was not measured: ${why}.`, []];
      const cells = isRight ? [brief(ms), brief(FLOPS / ms / 1e6)] : [why ? `needs ${why}` : "wrong", "–"];
      rows.push([`step ${step} on the GPU`, ...cells, ...HEADS.slice(3).fill("–")]);
    }
    return [`The GPU is ${name}${isCpu ? ", a driver on the CPU, so it is slow" : ""}.`, rows];
  }

  table(peak, points, onGpu) {
    const rows = points.map(({ part, milliseconds, speed, moved, scratch, intensity }) => {
      const share = `${brief((100 * speed) / peak)} %`,
        counted = moved ? [bytes(moved), brief(intensity)] : ["–", "–"];
      return [part, brief(milliseconds), brief(speed / 1e9), share, ...counted, bytes(scratch)];
    });
    $("figures").tHead.replaceChildren(make("tr", {}, ...HEADS.map((head) => make("th", {}, head))));
    $("figures").tBodies[0].replaceChildren(...[...rows, ...onGpu].map((cells) => tableRow(null, ...cells)));
  }

  // Logarithmic axes: FLOP/byte, FLOP/s.
  draw(peak, bandwidths, points) {
    const picture = $("roofline"),
      most = 10 ** Math.ceil(Math.log10(peak * 1.05)),
      least = most / 1e3,
      [from, to] = [1 / 64, 256];
    picture.replaceChildren();
    const add = (tag, attributes, text = "") => {
      const element = document.createElementNS(picture.namespaceURI, tag);
      for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
      element.append(text);
      picture.append(element);
    };
    const label = (text, x, y, anchor = "start", more = {}) =>
      add("text", { x, y, "text-anchor": anchor, ...more }, text);
    const grid = (x1, x2, y1, y2) => add("line", { class: "grid", x1, x2, y1, y2 });
    const wide = (RIGHT - LEFT) / Math.log(to / from),
      tall = (BOTTOM - TOP) / Math.log(most / least);
    const x = (i) => LEFT + wide * Math.log(Math.min(to, Math.max(from, i)) / from),
      y = (f) => BOTTOM - tall * Math.log(Math.max(f, least) / least);
    for (let f = least; f <= most * 1.01; f *= 10) {
      grid(LEFT, RIGHT, y(f), y(f));
      label(f >= 9e8 ? `${Math.round(f / 1e9)} G` : `${Math.round(f / 1e6)} M`, LEFT - 8, y(f) + 4, "end");
    }
    for (let i = from; i <= to; i *= 4) {
      grid(x(i), x(i), TOP, BOTTOM);
      label(i < 1 ? `1/${1 / i}` : i, x(i), BOTTOM + 20, "middle");
    }
    label("operations per byte that comes into L1", (LEFT + RIGHT) / 2, HEIGHT - 8, "middle");
    label("operations a second", 0, 14);
    const turn = (Math.atan2(tall, wide) * 180) / Math.PI; // degrees
    let named = Infinity; // the last bandwidth with a name
    bandwidths.forEach((bandwidth, n) => {
      const ridge = Math.min(to, peak / bandwidth),
        start = Math.max(from, least / bandwidth),
        [x0, y0] = [x(start), y(start * bandwidth)];
      if (ridge <= from) return;
      add("path", { class: "slope", d: `M${x0} ${y0}L${x(ridge)} ${y(ridge * bandwidth)}` });
      if (bandwidth > named / NEAR) return;
      named = bandwidth;
      const same = BUFFERS.filter((_, i) => i >= n && bandwidths[i] > bandwidth / NEAR).map(bytes);
      label(same.join(", "), x0 + 14, y0 - 6, "start", { transform: `rotate(${-turn} ${x0} ${y0})` });
    });
    const widest = Math.max(...bandwidths);
    if (bandwidths.length) add("path", { class: "roof", d: `M${x(peak / widest)} ${y(peak)}H${RIGHT}` });
    // A name is right of its point, or left if another point is there.
    const near = (a, b) => a !== b && x(b.intensity) - x(a.intensity) < 70 && x(b.intensity) >= x(a.intensity);
    for (const point of points.filter(({ moved }) => moved)) {
      const [cx, cy] = [x(point.intensity), y(point.speed)];
      const isLeft = cx > RIGHT - 60 || points.some((p) => near(point, p) && Math.abs(y(p.speed) - cy) < 16);
      add("circle", { cx, cy, r: 5 });
      label(point.part, cx + (isLeft ? -10 : 10), cy + 4, isLeft ? "end" : "start", { class: "name" });
    }
  }
}
