// What web/build.py writes into facts.js: the tables of Python that the page needs.

/** The page begins with this model. */
export const MODEL: string;
/** Each model's files: config.json, the vocabulary, and the paths of its weights by precision. */
export const MODELS: Record<string, { config: Config; characters: string[]; weights: Record<string, string> }>;
/** The kernels' precisions, in their order. */
export const PRECISIONS: string[];
/** The parts that are kernels, in their order. */
export const PARTS: { name: string; operator: string }[];
/** Names of the sizes that the kernels are compiled with. */
export const BLOCK: string[];
/** Br and Bc of part 4. */
export const TILE: [number, number];
/** The settings of sampling with a slider: least, most (null: the vocabulary) and step. */
export const SLIDERS: { name: string; default: number; slider: [number, number | null, number] }[];
/** All settings of sampling, in the kernels' order, each switched off. */
export const OFF: Record<string, number>;
/** Names of part 4's steps in WGSL, and of those that a call uses, the fastest first. */
export const STEPS: string[];
export const FASTEST: string[];
/** Keys of the decoder's tiles in WGSL, of which the largest that fits is taken. */
export const TILES: number[];
/** The largest of each size of a model. */
export const SIZES: Record<string, number>;
/** Constants of decoder.wgsl. */
export const DECODER: Record<string, number>;
/** The loop nests of the parts. */
export const NESTS: Record<string, string>;
/** lab/traffic.json */
export const TRAFFIC: {
  constants: { LINE: number; FLOAT_BYTES: number; CACHE_WAYS: number };
  sizes: Record<string, string>;
  parts: Record<string, {
    sizes: Record<string, string>;
    streams: { name: string; least: string; again?: [string, string][]; scratch?: boolean }[];
  }>;
};

/** The recipe for an own text, and the training step's settings, in the order of training_step.h. */
export const RECIPE: Record<string, any>;
export const OPTIMIZER: Record<string, number | number[]>;
/** Of training/recipe.py. */
export const SHORTEST: number;
export const MOST_EVALUATED: number;
export const MOST_WATCHED: number;
export const EVALUATIONS: number;
export const LONGEST_WAIT: number;
export const MARGIN: number;
export const GOLDEN: number;

export interface Config {
  block_size: number;
  vocab_size: number;
  n_layer: number;
  n_head: number;
  n_embd: number;
  bias?: boolean;
  window?: number | null;
  eos_token_id?: number | number[] | null;
}
