// @ts-check
// The view Measure: a roofline of one worker on this machine, after Williams, Waterman & Patterson 2009.
import { $, brief, bytes, number, on, say, tableRow } from "./dom.js";
import { PARTS, STEPS, TILE } from "./facts.js";
import { Plot } from "./plot.js";
import { streams, traffic } from "./traffic.js";

const N = 1024;
export const CALL = { heads: 4, N, d: 32 }; // the call of attention that is timed
const FLOPS = 4 * CALL.heads * N * N * CALL.d; // of the two products
const BUFFERS = [16 << 10, 256 << 10, 64 << 20]; // in L1, in L2, in memory, on most machines
const L1 = 32 << 10;
const EDGES = { left: 62, right: 624, top: 30, bottom: 352 };
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
      const call = await engine.call("gpuAttention", { step, ...CALL }),
        { milliseconds: ms, isRight, why } = call;
      if (call.name) ({ name, isCpu } = call);
      if (why && !name) return [`The GPU was not measured: ${why}.`, []];
      const cells = isRight ? [brief(ms), brief(FLOPS / ms / 1e6)] : [why ? `needs ${why}` : "wrong", "–"];
      rows.push([`step ${step} on the GPU`, ...cells, "–", "–", "–", "–"]);
    }
    return [`The GPU is ${name}${isCpu ? ", a driver on the CPU, so it is slow" : ""}.`, rows];
  }

  table(peak, points, onGpu) {
    const rows = points.map(({ part, milliseconds, speed, moved, scratch, intensity }) => {
      const share = `${brief((100 * speed) / peak)} %`,
        counted = moved ? [bytes(moved), brief(intensity)] : ["–", "–"];
      return [part, brief(milliseconds), brief(speed / 1e9), share, ...counted, bytes(scratch)];
    });
    $("figures").hidden = false;
    $("figures").tBodies[0].replaceChildren(...[...rows, ...onGpu].map((cells) => tableRow(null, ...cells)));
  }

  // Logarithmic axes: FLOP/byte, FLOP/s.
  draw(peak, bandwidths, points) {
    const most = 10 ** Math.ceil(Math.log10(peak * 1.05)),
      least = most / 1e3,
      [from, to] = [1 / 64, 256],
      plot = new Plot("roofline", EDGES, [from, to].map(Math.log), [least, most].map(Math.log)),
      x = (i) => plot.x(Math.log(Math.min(to, Math.max(from, i)))),
      y = (f) => plot.y(Math.log(Math.max(f, least)));
    for (let f = least; f <= most * 1.01; f *= 10)
      plot.markY(Math.log(f), f >= 9e8 ? `${Math.round(f / 1e9)} G` : `${Math.round(f / 1e6)} M`);
    for (let i = from; i <= to; i *= 4) plot.markX(Math.log(i), i < 1 ? `1/${1 / i}` : i);
    plot.text("operations per byte that comes into L1", (EDGES.left + EDGES.right) / 2, 392, "middle");
    plot.text("operations a second", 0, 14);
    const turn = (Math.atan2(plot.tall, plot.wide) * 180) / Math.PI; // degrees
    let named = Infinity; // the last bandwidth with a name
    bandwidths.forEach((bandwidth, n) => {
      const ridge = Math.min(to, peak / bandwidth),
        start = Math.max(from, least / bandwidth),
        [x0, y0] = [x(start), y(start * bandwidth)];
      if (ridge <= from) return;
      plot.line("slope", [start, ridge].map((i) => [i, i * bandwidth].map(Math.log)));
      if (bandwidth > named / NEAR) return;
      named = bandwidth;
      const same = BUFFERS.filter((_, i) => i >= n && bandwidths[i] > bandwidth / NEAR).map(bytes);
      plot.text(same.join(", "), x0 + 14, y0 - 6, "start", { transform: `rotate(${-turn} ${x0} ${y0})` });
    });
    const widest = Math.max(...bandwidths);
    plot.line("roof", [peak / widest, to].map((i) => [i, peak].map(Math.log)));
    // A name is right of its point, or left if another point is there.
    const near = (a, b) => a !== b && x(b.intensity) - x(a.intensity) < 70 && x(b.intensity) >= x(a.intensity);
    for (const point of points.filter(({ moved }) => moved)) {
      const [cx, cy] = [x(point.intensity), y(point.speed)];
      const isLeft = cx > EDGES.right - 60 || points.some((p) => near(point, p) && Math.abs(y(p.speed) - cy) < 16);
      plot.add("circle", { cx, cy, r: 5 });
      plot.text(point.part, cx + (isLeft ? -10 : 10), cy + 4, isLeft ? "end" : "start", { class: "name" });
    }
  }
}
