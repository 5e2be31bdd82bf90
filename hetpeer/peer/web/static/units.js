// Numbers as people read them.

export const whole = (number) => Math.round(number).toLocaleString("en");

export const share = (part) => `${Math.round(100 * part)}%`;

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (number >= 1024 && place < units.length - 1) {
    number /= 1024;
    place += 1;
  }
  return `${number.toFixed(place && number < 10 ? 1 : 0)} ${units[place]}`;
}

export const rate = (bytesPerSecond) =>
  bytesPerSecond > 1.25e10 ? "too fast to measure" : `${((bytesPerSecond * 8) / 1e6).toFixed(1)} Mbit/s`;

export function duration(seconds) {
  for (const [unit, size, smaller, part] of [["d", 86400, "h", 3600], ["h", 3600, "m", 60], ["m", 60, "s", 1]]) {
    if (seconds >= size) return `${Math.floor(seconds / size)}${unit} ${Math.floor((seconds % size) / part)}${smaller}`;
  }
  return `${Math.round(seconds)}s`;
}

export const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString();
