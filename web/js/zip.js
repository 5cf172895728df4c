// @ts-check
// A .zip of a folder's files, not compressed, and its files again.

const [LOCAL, ENTRY, END] = [0x04034b50, 0x02014b50, 0x06054b50]; // signatures
const UTF8 = 1 << 11; // a flag: the encoding of names
const DAY = 33; // 1 January 1980, the first that the format knows

const TABLE = Uint32Array.from({ length: 256 }, (_, n) => {
  let sum = n;
  for (let bit = 0; bit < 8; bit++) sum = sum & 1 ? (sum >>> 1) ^ 0xedb88320 : sum >>> 1;
  return sum;
});

/** @param {Uint8Array} bytes */
function checksum(bytes) {
  let sum = 0xffffffff;
  for (const byte of bytes) sum = TABLE[(sum ^ byte) & 255] ^ (sum >>> 8);
  return ~sum >>> 0;
}

/** Numbers of 2 or 4 bytes: pairs of a size and a number. */
function packed(...fields) {
  const view = new DataView(new ArrayBuffer(fields.reduce((sum, [size]) => sum + size, 0)));
  let at = 0;
  for (const [size, value] of fields) {
    if (size === 2) view.setUint16(at, value, true);
    else view.setUint32(at, value, true);
    at += size;
  }
  return view;
}

/**
 * @param {string} folder
 * @param {Object<string, Uint8Array>} files by name
 */
export function zipped(folder, files) {
  const [parts, entries] = [[], []];
  let [at, listed] = [0, 0];
  for (const [file, content] of Object.entries(files)) {
    const name = new TextEncoder().encode(`${folder}/${file}`),
      { length } = content,
      common = [[2, 20], [2, UTF8], [2, 0], [2, 0], [2, DAY], [4, checksum(content)], [4, length], [4, length], [2, name.length], [2, 0]];
    parts.push(packed([4, LOCAL], ...common), name, content);
    entries.push(packed([4, ENTRY], [2, 20], ...common, [2, 0], [2, 0], [2, 0], [4, 0], [4, at]), name);
    at += 30 + name.length + length;
    listed += 46 + name.length;
  }
  const count = entries.length / 2,
    end = packed([4, END], [2, 0], [2, 0], [2, count], [2, count], [4, listed], [4, at], [2, 0]);
  return new Blob([...parts, ...entries, end], { type: "application/zip" });
}

/**
 * The files of a .zip as Files, without their folders. Raises Error with a sentence.
 * @param {File} zip
 */
export async function unzipped(zip) {
  const view = new DataView(await zip.arrayBuffer()),
    files = [];
  try {
    let end = view.byteLength - 22;
    while (view.getUint32(end, true) !== END) end--;
    let at = view.getUint32(end + 16, true);
    for (let count = view.getUint16(end + 10, true); count > 0; count--) {
      const [method, size, length] = [view.getUint16(at + 10, true), view.getUint32(at + 24, true), view.getUint16(at + 28, true)],
        local = view.getUint32(at + 42, true),
        begin = local + 30 + view.getUint16(local + 26, true) + view.getUint16(local + 28, true),
        name = new TextDecoder().decode(new Uint8Array(view.buffer, at + 46, length));
      if (method) throw new Error("its files are compressed");
      files.push(new File([new Uint8Array(view.buffer, begin, size)], name.replace(/.*\//, "")));
      at += 46 + length + view.getUint16(at + 30, true) + view.getUint16(at + 32, true);
    }
  } catch (error) {
    throw new Error(`${zip.name} is not a .zip that the page can read (${error.message}); choose the files in it`);
  }
  return files;
}
