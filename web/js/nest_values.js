// @ts-check
// The values of a loop nest: ranges of numbers, and the error that a reader sees.
import { Problem } from "./problem.js";

/** @param {number} at @param {string} text @returns {never} */
export function fail(at, text) { throw new Problem(`Line ${at}: ${text}.`); }

// The numbers [a, b). kind: "query" or "key" if they count such; base: which of them 0 is.
export const span = (a, b, kind = null, base = 0) => ({ a, b, kind, base });
export const size = ({ a, b }) => b - a;
