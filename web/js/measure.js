// The view Measure: a roofline of one worker on this machine, after Williams, Waterman & Patterson 2009.
import { $, brief, bytes, make } from "./dom.js";
import { flops, traffic } from "./costs.js";

const CASE = { N: 1024, d: 32, heads: 4, causal: false, br: 192, bc: 256 };
const BUFFERS = [16 << 10, 256 << 10, 64 << 20]; // in L1, in L2, in memory, on most machines
const L1 = 32 << 10;
const HEADS = ["part", "ms", "GFLOP/s", "of the peak", "bytes into 32 KB", "FLOP/byte", "scratch"];
const HEIGHT = 400,
  LEFT = 62,
  BOTTOM = 352,
  RIGHT = 624,
  TOP = 30;

export class MeasureView {
  constructor(page) {
    this.page = page;
    $("measure-go").addEventListener("click", () => this.measure());
    $("copy").addEventListener("click", () => this.copy());
  }

  show() {
    if (!this.points) this.draw(9e10, [], []); // the axes
  }

  async measure() {
    const { engine } = this.page,
      say = (text) => {
        $("measure-status").textContent = text;
      };
    if (!engine) return;
    $("measure-go").disabled = true;
    this.page.text?.halt(); // it would slow the measurement
    try {
      say("Multiply-adds …");
      const peak = await engine.call("peak", {}),
        block = await engine.call("block"),
        bandwidths = [];
      for (const size of BUFFERS) {
        say(`Reads from ${bytes(size)} …`);
        bandwidths.push(await engine.call("bandwidth", { bytes: size }));
      }
      this.points = [];
      for (const { name: part } of engine.parts) {
        say(`${part} …`);
        const milliseconds = await engine.call("attention", { part, H: CASE.heads, ...CASE });
        const scratch = await engine.call("scratch", { part, H: CASE.heads, ...CASE });
        const moved = traffic(part, CASE, block, L1)?.reduce((sum, s) => sum + s.bytes, 0); // undefined for a part without counts
        const speed = flops(CASE) / (milliseconds / 1e3);
        this.points.push({ part, milliseconds, speed, moved, scratch, intensity: flops(CASE) / moved });
      }
      this.draw(peak, bandwidths, this.points);
      this.table(peak);
      $("copy").disabled = false;
      say(
        `One worker: ${brief(peak / 1e9)} GFLOP/s of multiply-adds; reads of ` +
          BUFFERS.map((size, i) => `${brief(bandwidths[i] / 1e9)} GB/s from ${bytes(size)}`).join(", ") +
          `. ${CASE.heads} heads, N = 1,024, d = ${CASE.d}, no mask.`,
      );
    } catch (error) {
      this.page.problem(error);
    }
    $("measure-go").disabled = false;
  }

  table(peak) {
    this.rows = this.points.map(({ part, milliseconds, speed, moved, scratch, intensity }) => [
      part,
      brief(milliseconds),
      brief(speed / 1e9),
      `${brief((100 * speed) / peak)} %`,
      moved ? bytes(moved) : "–",
      moved ? brief(intensity) : "–",
      bytes(scratch),
    ]);
    const row = (cells, tag) => make("tr", {}, ...cells.map((textContent) => make(tag, { textContent })));
    $("figures").tHead.replaceChildren(row(HEADS, "th"));
    $("figures").tBodies[0].replaceChildren(...this.rows.map((cells) => row(cells, "td")));
  }

  // The table as Markdown.
  async copy() {
    const lines = [HEADS, HEADS.map(() => "---"), ...this.rows].map((cells) => `| ${cells.join(" | ")} |`);
    try {
      await navigator.clipboard.writeText(`${lines.join("\n")}\n\n${$("measure-status").textContent}\n`);
      $("copy").textContent = "Copied";
    } catch {
      $("copy").textContent = "The browser forbids copying";
    }
    setTimeout(() => {
      $("copy").textContent = "Copy the table";
    }, 2000);
  }

  // Logarithmic axes: FLOP/byte, FLOP/s.
  draw(peak, bandwidths, points) {
    const svg = $("roofline"),
      parts = [];
    const add = (tag, attributes, text) => {
      const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
      if (text !== undefined) element.textContent = text;
      parts.push(element);
    };
    const most = 10 ** Math.ceil(Math.log10(peak * 1.05)),
      least = most / 1e3,
      [from, to] = [1 / 64, 256];
    const x = (i) =>
      LEFT + ((RIGHT - LEFT) * Math.log(Math.min(to, Math.max(from, i)) / from)) / Math.log(to / from);
    const y = (f) => BOTTOM - ((BOTTOM - TOP) * Math.log(Math.max(f, least) / least)) / Math.log(most / least);
    for (let f = least; f <= most * 1.01; f *= 10) {
      add("line", { class: "grid", x1: LEFT, x2: RIGHT, y1: y(f), y2: y(f) });
      add(
        "text",
        { x: LEFT - 8, y: y(f) + 4, "text-anchor": "end" },
        f >= 9e8 ? `${Math.round(f / 1e9)} G` : `${Math.round(f / 1e6)} M`,
      );
    }
    for (let i = from; i <= to; i *= 4) {
      add("line", { class: "grid", x1: x(i), x2: x(i), y1: TOP, y2: BOTTOM });
      add("text", { x: x(i), y: BOTTOM + 20, "text-anchor": "middle" }, i < 1 ? `1/${1 / i}` : i);
    }
    add(
      "text",
      { x: (LEFT + RIGHT) / 2, y: HEIGHT - 8, "text-anchor": "middle" },
      "operations per byte that comes into L1",
    );
    add("text", { x: 0, y: 14 }, "operations a second");
    const [tall, wide] = [(BOTTOM - TOP) / Math.log(most / least), (RIGHT - LEFT) / Math.log(to / from)];
    const turn = (Math.atan2(tall, wide) * 180) / Math.PI; // degrees
    let named = Infinity; // the last bandwidth with a name
    bandwidths.forEach((bandwidth, n) => {
      const ridge = Math.min(to, peak / bandwidth),
        start = Math.max(from, least / bandwidth);
      if (ridge > from)
        add("path", {
          class: "slope",
          d: `M${x(start)} ${y(start * bandwidth)}L${x(ridge)} ${y(ridge * bandwidth)}`,
        });
      if (ridge <= from || bandwidth > named / 1.4) return; // that name is near enough
      named = bandwidth;
      const same = BUFFERS.filter((_, i) => i >= n && bandwidths[i] > bandwidth / 1.4);
      const [tx, ty] = [x(start), y(start * bandwidth)];
      add(
        "text",
        { x: tx + 14, y: ty - 6, transform: `rotate(${-turn} ${tx} ${ty})` },
        same.map(bytes).join(", "),
      );
    });
    if (bandwidths.length)
      add("path", {
        class: "roof",
        d: `M${x(Math.max(from, peak / Math.max(...bandwidths)))} ${y(peak)}H${RIGHT}`,
      });
    // A name is right of its point, or left if another point is there.
    const near = (a, b) => a !== b && x(b.intensity) - x(a.intensity) < 70 && x(b.intensity) >= x(a.intensity);
    for (const point of points.filter(({ moved }) => moved)) {
      const [cx, cy] = [x(point.intensity), y(point.speed)];
      const isLeft = cx > RIGHT - 60 || points.some((p) => near(point, p) && Math.abs(y(p.speed) - cy) < 16);
      add("circle", { cx, cy, r: 5 });
      add(
        "text",
        { class: "name", x: cx + (isLeft ? -10 : 10), y: cy + 4, "text-anchor": isLeft ? "end" : "start" },
        point.part,
      );
    }
    svg.replaceChildren(...parts);
  }
}
