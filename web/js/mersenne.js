// The uniform numbers of a seed: those of torch.rand(dtype=torch.float64).
//
// Matsumoto & Nishimura 1998, 'Mersenne Twister: a 623-dimensionally equidistributed uniform pseudo-random number
// generator'. As in PyTorch, only the lower 32 bits of a seed are used, and a double has the lower 53 bits of two numbers.

const N = 624,
  M = 397;

export class Mersenne {
  // seed: a BigInt of 64 bits, or a whole number.
  constructor(seed) {
    this.state = new Uint32Array(N);
    this.state[0] = Number(BigInt.asUintN(32, BigInt(seed)));
    for (let i = 1; i < N; i++) {
      const last = this.state[i - 1] ^ (this.state[i - 1] >>> 30);
      this.state[i] = Math.imul(1812433253, last) + i;
    }
    this.at = N;
  }

  // The next 32 bits.
  next() {
    if (this.at === N) this.twist();
    let y = this.state[this.at++];
    y ^= y >>> 11;
    y ^= (y << 7) & 0x9d2c5680;
    y ^= (y << 15) & 0xefc60000;
    return (y ^ (y >>> 18)) >>> 0;
  }

  twist() {
    const s = this.state;
    for (let i = 0; i < N; i++) {
      const y = (s[i] & 0x80000000) | (s[(i + 1) % N] & 0x7fffffff);
      s[i] = s[(i + M) % N] ^ (y >>> 1) ^ (y & 1 ? 0x9908b0df : 0);
    }
    this.at = 0;
  }

  // A number in [0, 1).
  uniform() {
    const upper = this.next() & 0x1fffff,
      lower = this.next();
    return (upper * 2 ** 32 + lower) * 2 ** -53;
  }
}
