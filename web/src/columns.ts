// Tables of numbers that grow, for trees of 100,000 nodes.

/** Finds a child by its parent and a key; open addressing, since Map is ten times slower here. */
export class Children {
  private keys: Uint32Array;
  private values: Int32Array;
  private used = 0;

  constructor(room = 1 << 12) {
    this.keys = new Uint32Array(2 * room);
    this.values = new Int32Array(room).fill(-1);
  }

  /** The child, or -1 - (the place to put it at). */
  find(parent: number, key: number): number {
    const mask = this.values.length - 1;
    let place = (Math.imul(parent, 0x9e3779b1) ^ Math.imul(key, 0x85ebca6b)) >>> 0;
    place = (place ^ (place >>> 15)) & mask;
    for (;;) {
      const value = this.values[place]!;
      if (value < 0) return -1 - place;
      if (this.keys[2 * place] === parent && this.keys[2 * place + 1] === key) return value;
      place = (place + 1) & mask;
    }
  }

  put(place: number, parent: number, key: number, value: number): void {
    this.keys[2 * place] = parent;
    this.keys[2 * place + 1] = key;
    this.values[place] = value;
    this.used += 1;
    if (2 * this.used > this.values.length) this.grow();
  }

  private grow(): void {
    const { keys, values } = this;
    this.keys = new Uint32Array(2 * keys.length);
    this.values = new Int32Array(2 * values.length).fill(-1);
    for (let i = 0; i < values.length; i++) {
      if (values[i]! < 0) continue;
      const place = -1 - this.find(keys[2 * i]!, keys[2 * i + 1]!);
      this.keys[2 * place] = keys[2 * i]!;
      this.keys[2 * place + 1] = keys[2 * i + 1]!;
      this.values[place] = values[i]!;
    }
  }
}

/** A column of numbers that grows. */
export class Growing<T extends Int32Array | Float64Array | Uint8Array> {
  constructor(public values: T) {}

  ensure(length: number): void {
    if (length <= this.values.length) return;
    const make = this.values.constructor as new (length: number) => T;
    const larger = new make(Math.max(length, 2 * this.values.length));
    larger.set(this.values as never);
    this.values = larger;
  }
}
