// Numbers for people. Bytes become GiB only here.

const UNITS = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/** Bytes in the largest unit of 1024 that they fill, one digit, rounded half up: "75.8 GiB". */
export function humanBytes(bytes: number): string {
  const sign = bytes < 0 ? "-" : "";
  const size = Math.abs(bytes);
  if (size < 1024) return `${sign}${Math.round(size)} B`;
  let power = 0;
  let scale = 1024;
  let tenths = Math.floor((size * 10) / scale + 0.5);
  while (tenths >= 10240 && power < UNITS.length - 1) {
    power += 1;
    scale *= 1024;
    tenths = Math.floor((size * 10) / scale + 0.5);
  }
  return `${sign}${Math.floor(tenths / 10)}.${tenths % 10} ${UNITS[power]}`;
}

/** With a sign in front, also of what grew: "+1.5 MiB". */
export function signedBytes(bytes: number): string {
  return bytes > 0 ? `+${humanBytes(bytes)}` : humanBytes(bytes);
}

export function percent(part: number, whole: number): string {
  return whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "-";
}

/** Whole numbers with commas. */
export function count(value: number): string {
  return Math.round(value).toLocaleString("en-US");
}

export function plural(value: number, one: string, many = `${one}s`): string {
  return `${count(value)} ${value === 1 ? one : many}`;
}

/** Seconds after some beginning, as exact as the range that is looked at asks for. */
export function seconds(value: number, range: number): string {
  const digits = range <= 0 ? 6 : Math.min(6, Math.max(0, 2 - Math.floor(Math.log10(range))));
  return `${value.toFixed(digits)} s`;
}

/** Microseconds since 1970 in UTC, to the millisecond. */
export function utc(timeUs: number): string {
  const date = new Date(timeUs / 1000);
  if (Number.isNaN(date.getTime())) return "";
  return `${date.toISOString().replace("T", " ").slice(0, 23)} UTC`;
}

export function hex(address: bigint): string {
  return `0x${address.toString(16)}`;
}

/** Of a C++ name what tells most, for where the whole does not fit: "MmBackward0::apply". */
export function shortName(name: string): string {
  if (!name.includes("::")) return name;
  const plain = name.replaceAll("(anonymous namespace)", "anonymous").replaceAll("operator()", "operator");
  const bare = plain.replace(/[(<{[].*/s, "");
  const spaced = bare.slice(bare.lastIndexOf(" ", bare.length - 2) + 1);
  const parts = spaced.split("::").filter((part) => part && part !== "anonymous");
  return parts.slice(-2).join("::") || name;
}

/** What a terminal or page would act on or hide, made visible. */
export function printable(text: string): string {
  return text.replace(
    /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2064\u2066-\u2069\ufeff]/g,
    (found) => `\\u${found.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}
