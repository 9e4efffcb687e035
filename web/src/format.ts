// Numbers, sizes and times in words that a person reads at a glance.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const DASH = "–";

export function count(value: number | null | undefined): string {
  return value == null ? DASH : whole.format(value);
}

/** 1 -> "1 step", 2 -> "2 steps", 2 -> "2 batches", 2 -> "2 copies". */
export function plural(value: number, noun: string): string {
  return `${count(value)} ${nounOf(value, noun)}`;
}

/** The noun without its number, where the number is shown on its own. */
export function nounOf(value: number, noun: string): string {
  if (value === 1) return noun;
  if (/[^aeiou]y$/.test(noun)) return `${noun.slice(0, -1)}ies`;
  return /(ch|s|x)$/.test(noun) ? `${noun}es` : `${noun}s`;
}

/** "30 of 40"; a round that waits for others is due, and the steps made since then are not "48 of 40". */
export function stepsWords({ inner_step: made, inner_steps_total: wanted }: { inner_step: number; inner_steps_total: number }): string {
  return made >= wanted ? `due, after ${plural(made, "step")}` : `${count(made)} of ${count(wanted)}`;
}

/** 1234567 -> "1.23 million"; below 100,000 the exact number. */
export function bigCount(value: number | null | undefined): string {
  if (value == null) return DASH;
  if (value < 100_000) return whole.format(value);
  if (value < 1e3) return `${value.toFixed(0)} B`;
  if (value < 1e6) return `${(value / 1e3).toFixed(0)} thousand`;
  if (value < 1e9) return `${(value / 1e6).toFixed(2)} million`;
  return `${(value / 1e9).toFixed(2)} billion`;
}

export function loss(value: number | null | undefined): string {
  return value == null ? DASH : value.toFixed(value < 10 ? 3 : 2);
}

export function bytes(value: number | null | undefined): string {
  if (value == null) return DASH;
  if (value < 1e3) return `${value.toFixed(0)} B`;
  if (value < 1e6) return `${(value / 1e3).toFixed(value < 1e4 ? 1 : 0)} kB`;
  if (value < 1e9) return `${(value / 1e6).toFixed(value < 1e7 ? 1 : 0)} MB`;
  return `${(value / 1e9).toFixed(1)} GB`;
}

/** Floating-point operations per second: "56.1 GFLOP/s". */
export function flopRate(value: number | null | undefined): string {
  if (value == null) return DASH;
  const [factor, prefix] = value < 1e12 ? [1e9, "G"] : [1e12, "T"];
  return `${Number((value / factor).toPrecision(3))} ${prefix}FLOP/s`;
}

export function percent(fraction: number | null | undefined): string {
  if (fraction == null || !Number.isFinite(fraction)) return DASH;
  if (fraction > 0 && fraction < 0.005) return "under 1 %";
  return `${(Math.min(Math.max(fraction, 0), 1) * 100).toFixed(0)} %`;
}

/** Seconds as "8 s", "3 min", "2 h 5 min", "4 days". */
export function duration(seconds: number | null | undefined): string {
  if (seconds == null || !Number.isFinite(seconds)) return DASH;
  if (seconds > 0 && seconds < 1) return `${seconds.toFixed(1)} s`;
  const s = Math.max(0, Math.round(seconds));
  if (s < 90) return `${s} s`;
  const minutes = Math.round(s / 60);
  if (minutes < 90) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  return `${Math.round(hours / 24)} days`;
}

/** Durations down to milliseconds: "340 ms", "1.25 s", "12.3 s". */
export function shortTime(seconds: number | null | undefined): string {
  if (seconds == null || !Number.isFinite(seconds)) return DASH;
  if (seconds < 0.0005) return "0 s";
  if (seconds < 0.9995) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 9.995) return `${seconds.toFixed(2)} s`;
  return seconds < 99.5 ? `${seconds.toFixed(1)} s` : duration(seconds);
}

/** ["a", "b", "c"] -> "a, b and c". */
export function listed(words: readonly string[]): string {
  return words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words[words.length - 1]}`;
}

export function ago(time: number | null | undefined, now: number): string {
  return time == null ? "never" : `${duration(now - time)} ago`;
}

/** How long the node has run: its date may have jumped meanwhile, so only what passed since the snapshot is added. */
export function runningFor(status: { time: number; uptime_seconds: number }, nodeNow: number): string {
  return duration(status.uptime_seconds + Math.max(0, nodeNow - status.time));
}

/** Times of the node are seconds since the epoch. */
export function clock(time: number): string {
  return new Date(time * 1000).toLocaleTimeString([], { hour12: false });
}

/** "15:11" */
export function shortClock(time: number): string {
  return new Date(time * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false });
}

export function dateAndTime(time: number): string {
  return new Date(time * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "medium", hour12: false });
}

/** A wallet by its first eight digits, as everywhere. */
export function walletName(id: string | null | undefined): string {
  return id ? id.slice(0, 8) : DASH;
}

export function shortId(id: string | null | undefined): string {
  if (!id) return DASH;
  return id.length > 18 ? `${id.slice(0, 8)}…${id.slice(-6)}` : id;
}

/** Loss in nats -> between how many equally likely word pieces the model hesitates on average. */
export function choices(lossInNats: number): string {
  const value = Math.exp(lossInNats);
  if (value < 10) return value.toFixed(1);
  if (value < 1000) return value.toFixed(0);
  return whole.format(Number(value.toPrecision(2)));
}

export function layerRange(layers: { start: number; stop: number }): string {
  const last = layers.stop - 1;
  return layers.start === last ? `layer ${last + 1}` : `layers ${layers.start + 1}–${last + 1}`;
}
