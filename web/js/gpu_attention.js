// @ts-check
// Part 4's steps in WGSL, compared with part 4 and timed.
import { check } from "./problem.js";

const MOST_ERROR = 1e-4; // the steps' sums have another order
const LEAST_MS = 100; // of many dispatches: a browser's clock is coarse

// {name, isCpu, milliseconds, isRight} of a step: {needs, tiles}, see build.py. example: q, k, v and the output
// (heads, N, d), one after the other. Raises Problem if the GPU lacks something or is lost.
/** @param {import("./gpu.js").Gpu} gpu @param {any} step @param {{ heads: number, N: number, d: number }} sizes @param {Float32Array} example */
export async function timedStep(gpu, { needs, tiles }, { heads, N, d }, example) {
  const { maxComputeWorkgroupStorageSize: most, maxComputeInvocationsPerWorkgroup: mostThreads } = gpu.limits,
    lacking = needs.filter((feature) => !gpu.features.includes(feature));
  check(!lacking.length, lacking.join(" and "));
  const { br, code } = tiles.find(({ memory, threads }) => memory <= most && threads <= mostThreads),
    pipeline = await gpu.pipeline([...needs.map((feature) => `enable ${feature};`), code].join("\n"), "main"),
    size = heads * N * d,
    part = (i) => example.subarray(i * size, (i + 1) * size),
    call = new Uint32Array([heads, N, N, 0, 0, 0, 0, 0]);
  new Float32Array(call.buffer)[5] = Math.LOG2E / Math.sqrt(d);
  const result = gpu.buffer(4 * size),
    inputs = [0, 1, 2].map((i) => gpu.buffer(part(i))),
    buffers = [...inputs, result, gpu.buffer(4 * heads * N), gpu.buffer(call, GPUBufferUsage.UNIFORM)],
    run = (times) => gpu.run(pipeline, buffers, [heads * Math.ceil(N / br)], 4 * size, { times, from: result }),
    expected = part(3),
    error = new Float32Array(await run(1)).reduce((worst, x, i) => Math.max(worst, Math.abs(x - expected[i])), 0); // NaN if one is
  let elapsed = 0;
  let times = 1;
  for (; elapsed < LEAST_MS; times *= 2) {
    const start = performance.now();
    await run(times);
    elapsed = performance.now() - start;
  }
  for (const buffer of buffers) buffer.destroy();
  return { name: gpu.name, isCpu: gpu.isCpu, milliseconds: (2 * elapsed) / times, isRight: error <= MOST_ERROR };
}
