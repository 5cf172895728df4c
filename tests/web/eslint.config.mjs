// ESLint's recommended rules for all JavaScript of the project; `make lint` runs them where npm has installed ESLint.
import js from "@eslint/js";
import globals from "globals";

const unused = { "no-unused-vars": ["error", { args: "after-used", caughtErrors: "none" }] };

export default [
  { ...js.configs.recommended, rules: { ...js.configs.recommended.rules, ...unused, eqeqeq: "error" } },
  { files: ["web/js/*.js"], languageOptions: { globals: { ...globals.browser, ...globals.worker } } },
  { files: ["web/sw.js"], languageOptions: { globals: globals.serviceworker } },
  {
    files: ["tests/web/*.mjs"], // their functions also run in pages
    languageOptions: { globals: { ...globals.node, ...globals.browser } },
  },
];
