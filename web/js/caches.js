// Two caches of a processor: lines of 64 bytes in sets of 8. The least recently used line of a set is replaced.

const LINE_FLOATS = 16;
const WAYS = 8;
export const LINE_BYTES = 64;

class Cache {
  constructor(bytes) {
    const lines = Math.max(1, Math.floor(bytes / LINE_BYTES));
    this.ways = Math.min(WAYS, lines);
    this.sets = Array.from({ length: Math.max(1, Math.floor(lines / WAYS)) }, () => []); // each from the oldest line to the latest
    this.misses = 0;
  }

  // Uses a line; returns whether it was in the cache.
  use(line) {
    const set = this.sets[line % this.sets.length],
      at = set.indexOf(line);
    if (at >= 0) set.splice(at, 1);
    else this.misses++;
    set.push(line);
    if (set.length > this.ways) set.shift();
    return at >= 0;
  }
}

// The memory of matrices {name: [rows, columns]} behind two caches. Each matrix begins at a line.
export class Memory {
  constructor(matrices, l1, l2) {
    this.at = {};
    this.size = 0; // in lines
    for (const [name, [rows, columns]] of Object.entries(matrices)) {
      this.at[name] = { first: this.size * LINE_FLOATS, columns };
      this.size += Math.ceil((rows * columns) / LINE_FLOATS);
    }
    this.l1 = new Cache(l1);
    this.l2 = new Cache(l2);
  }

  line(m, i, c) {
    const { first, columns } = this.at[m];
    return Math.floor((first + i * columns + c) / LINE_FLOATS);
  }

  // Reads or writes the columns [c0, c1) of a row.
  touch({ m, i, c0, c1 }) {
    const last = this.line(m, i, c1 - 1);
    for (let line = this.line(m, i, c0); line <= last; line++) if (!this.l1.use(line)) this.l2.use(line);
  }

  // The place of each line: 2 in L1, 1 in L2 only, 0 in memory only.
  places() {
    const found = new Uint8Array(this.size);
    for (const line of this.l2.sets.flat()) found[line] = 1;
    for (const line of this.l1.sets.flat()) found[line] = 2;
    return found;
  }

  bytes() {
    return { l1: LINE_BYTES * this.l1.misses, l2: LINE_BYTES * this.l2.misses };
  }
}

// {places, bytes} after each step.
export function simulate(steps, matrices, l1, l2) {
  const memory = new Memory(matrices, l1, l2);
  const after = steps.map((step) => {
    for (const access of step.touch()) memory.touch(access);
    return { places: memory.places(), bytes: memory.bytes() };
  });
  return { memory, after };
}
