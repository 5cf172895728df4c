// @ts-check
// A sentence for the reader of the page. Any other error is a fault of the program.
export class Problem extends Error {}

export function check(holds, message) { if (!holds) throw new Problem(message); }
