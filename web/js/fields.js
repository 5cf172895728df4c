// @ts-check
// The fields: each shows the choice of its name, within its bounds, and a slider's <output> shows its value.
import { $, make, option } from "./dom.js";
import { admitted, CHOICES, SETTINGS } from "./state.js";

/** @type {() => NodeListOf<any>} */
const all = () => document.querySelectorAll("[name]:not(meta)");

// Gives the fields their bounds; each change calls changed({name: value}).
/** @param {(changes: Record<string, any>) => void} changed */
export function bind(changed) {
  $("sampling").replaceWith(...SETTINGS.flatMap(slider));
  for (const field of all()) {
    const { name } = field,
      { least, most, by, labels, values } = CHOICES[name];
    if (values) field.append(...values.map((value) => option(value, labels[value])));
    if (field.type === "range" || field.type === "number")
      Object.assign(field, { min: least, max: most, step: field.step || by });
    field.addEventListener(field.type === "range" ? "input" : "change", () => {
      const value = admitted(name, field.value);
      if (value !== undefined) changed({ [name]: value });
    });
  }
}

export function fill(choices) { for (const field of all()) field.value = choices[field.name]; }

// The label and the slider of a setting of sampling: top_k is "Top-k".
function slider({ name, choice, slider: [, , step] }) {
  const label = name[0].toUpperCase() + name.slice(1).replaceAll("_", "-");
  const output = make("output", { id: `${choice}-out`, htmlFor: choice });
  return [
    make("label", { className: "slider", htmlFor: choice }, make("span", {}, label), output),
    make("input", { type: "range", id: choice, name: choice, step }),
  ];
}
