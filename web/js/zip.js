// @ts-check
// A .zip of a folder's files, and its files again. The browser packs them as gzip, which has what a .zip needs.
import { passed } from "./files.js";

const [LOCAL, ENTRY, END] = [0x0403, 0x0201, 0x0605]; // signatures, without their first half:
const PK = 0x4b50;
const UTF8 = 1 << 11; // a flag: the encoding of names
const DEFLATE = 8; // a method
const DAY = 33; // 1 January 1980, the first that the format knows

const halves = (x) => [x & 0xffff, x >>> 16];
const size = (parts) => halves(new Blob(parts).size);

/**
 * @param {string} folder
 * @param {Object<string, Blob>} files by name
 */
export async function zipped(folder, files) {
  /** @type {BlobPart[][]} */
  const [parts, entries] = [[], []];
  for (const [file, content] of Object.entries(files)) {
    const name = new TextEncoder().encode(`${folder}/${file}`),
      gzip = await passed(content, new CompressionStream("gzip")),
      data = gzip.slice(10, -8),
      [sum, sum2, ...bytes] = new Uint16Array(gzip.slice(-8)),
      common = [20, UTF8, DEFLATE, 0, DAY, sum, sum2, ...size([data]), ...bytes, name.length, 0];
    entries.push(Uint16Array.of(PK, ENTRY, 20, ...common, 0, 0, 0, 0, 0, ...size(parts)), name);
    parts.push(Uint16Array.of(PK, LOCAL, ...common), name, data);
  }
  const count = entries.length / 2,
    end = Uint16Array.of(PK, END, 0, 0, count, count, ...size(entries), ...size(parts), 0);
  return new Blob([...parts, ...entries, end], { type: "application/zip" });
}

/**
 * The files of a .zip as Files, without their folders. Raises Error with a sentence.
 * @param {File} zip
 */
export async function unzipped(zip) {
  const view = new DataView(await zip.arrayBuffer()),
    short = (at) => view.getUint16(at, true),
    long = (at) => view.getUint32(at, true),
    files = [];
  try {
    let end = view.byteLength - 22;
    while (short(end) !== PK || short(end + 2) !== END) end--;
    let at = long(end + 16);
    for (let count = short(end + 10); count > 0; count--) {
      const local = long(at + 42),
        begin = local + 30 + short(local + 26) + short(local + 28),
        name = new TextDecoder().decode(view.buffer.slice(at + 46, at + 46 + short(at + 28))),
        data = new Blob([view.buffer.slice(begin, begin + long(at + 20))]),
        content = short(at + 10) === DEFLATE ? await passed(data, new DecompressionStream("deflate-raw")) : data;
      files.push(new File([content], name.replace(/.*\//, "")));
      at += 46 + short(at + 28) + short(at + 30) + short(at + 32);
    }
  } catch (error) {
    throw new Error(`${zip.name} is not a .zip that the page can read (${error.message}); choose the files in it`);
  }
  return files;
}
