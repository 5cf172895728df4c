// @ts-check
// The choices. Each is a field of index.html with its default and its bounds; the address's fragment has them as
// #view?name=value&... without defaults.
import { $, algorithmOf, make, option } from "./dom.js";
import { MODEL, MODELS, PARTS } from "./facts.js";
import { formatBranches, MOST_SEED, parseBranches, SETTINGS } from "./state.js";

// The label and the slider of a setting of sampling: top_k is "Top-k".
function slider({ name, choice, default: value, slider: [min, max, step] }) {
  const label = name[0].toUpperCase() + name.slice(1).replaceAll("_", "-"),
    output = make("output", { id: `${choice}-out`, htmlFor: choice }),
    input = make("input", { type: "range", id: choice, name: choice, min, step, defaultValue: value });
  if (max !== null) input.max = max; // else the vocabulary's size is
  return [make("label", { className: "slider", htmlFor: choice }, make("span", {}, label), output), input];
}

$("sampling").replaceWith(...SETTINGS.flatMap(slider));
$("model").append(...Object.keys(MODELS).map((name) => option(name, name, name === MODEL)));
const parts = PARTS.map(({ name, operator }) => option(name, `${name}, ${algorithmOf(operator)}`, name === "part4"));
$("tiles-part").prepend(...parts);

/** @type {any[]} */
const FIELDS = [...document.querySelectorAll("[name]:not(meta)")];
const VIEWS = [...document.querySelectorAll("main > section")].map(({ id }) => id);

// The fields as they are written, in which the browser checks a value; views change the bounds of those on the page.
const CHECKS = new Map(FIELDS.map((field) => [field.name, check(field.cloneNode(true))]));
const DEFAULTS = Object.fromEntries(FIELDS.map((field) => [field.name, valueOf(field.name, defaultOf(field))]));

function check(field) {
  field.required = !isText(field);
  if (field.type === "range") field.type = "number"; // it takes a value as it is
  if (field.step % 1) field.step = "any";
  return field;
}

function isText({ type }) { return ["text", "textarea"].includes(type); }

function defaultOf({ options, defaultValue }) {
  return options ? ([...options].find(({ defaultSelected }) => defaultSelected) ?? options[0]).value : defaultValue;
}

// A number, unless the field is one of text or has words.
function valueOf(name, text) {
  const number = Number(text);
  return isText(CHECKS.get(name)) || Number.isNaN(number) ? text : number;
}

export const randomSeed = () => String(Math.floor(Math.random() * 2 ** 32));

// The value that a text means for a choice; undefined if there is none.
/** @param {string} name @param {string} given */
function admitted(name, given) {
  if (name === "seed" && given === "-1") return randomSeed();
  if (name === "branches") return formatBranches(parseBranches(given));
  const field = CHECKS.get(name);
  field.value = given;
  const isFine = field.checkValidity() && (field.value === given || isText(field)),
    isLong = field.maxLength > 0 && given.length > field.maxLength; // browsers check what is typed
  if (isFine && !isLong && (name !== "seed" || BigInt(given) < MOST_SEED)) return valueOf(name, given);
}

// Each change of a field calls changed({name: value}), before the field's event `change`.
/** @param {(changes: Record<string, any>) => void} changed */
export function bind(changed) {
  for (const field of FIELDS) {
    field.addEventListener("input", () => {
      const value = admitted(field.name, field.value);
      if (value !== undefined) changed({ [field.name]: value });
    });
  }
}

export function fill(choices) { for (const field of FIELDS) field.value = choices[field.name]; }

// {view, choices} of a fragment; no view for #main. Unknown names and values out of their range are ignored.
/** @param {string} fragment @returns {{ view: string | undefined, choices: Record<string, any> }} */
export function parse(fragment) {
  const [view, query = ""] = fragment.slice(1).split(/\?(.*)/s),
    choices = { ...DEFAULTS };
  for (const [name, given] of new URLSearchParams(query))
    if (CHECKS.has(name)) choices[name] = admitted(name, given) ?? choices[name];
  return { view: VIEWS.find((name) => name === view), choices };
}

/** @param {string} view @param {Record<string, any>} choices @returns {string} */
export function format(view, choices) {
  const chosen = Object.entries(choices).filter(([name, value]) => value !== DEFAULTS[name] && CHECKS.has(name)),
    query = new URLSearchParams(chosen).toString();
  return `#${view}${query && `?${query}`}`;
}
