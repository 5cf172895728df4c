// The order of bytes in the page's weights: the first byte of each four, then the second bytes, the third, the fourth,
// and the rest. This puts all exponents together, and gzip makes bf16 weights 11 % smaller.

// bytes: an ArrayBuffer, as planes() in web/build.py makes it; the bytes in their own order.
export function joined(bytes) {
  const count = Math.floor(bytes.byteLength / 4),
    [a, b, c, d] = [0, 1, 2, 3].map((plane) => new Uint8Array(bytes, plane * count, count)),
    words = new Uint32Array(count);
  for (let i = 0; i < count; i++) words[i] = a[i] | (b[i] << 8) | (c[i] << 16) | (d[i] << 24);
  const whole = new Uint8Array(bytes.byteLength);
  whole.set(new Uint8Array(words.buffer));
  whole.set(new Uint8Array(bytes, 4 * count), 4 * count);
  return whole.buffer;
}
