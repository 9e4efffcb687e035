// Turns the answer of /api/config into groups of settings, and an input into a JSON value. Pure.

import { count } from "../format";

export interface Setting {
  value: unknown;
  source: string;
  allowed: string;
  applies: string;
  owner: string; // how its owner changes it, where a page may not; otherwise empty
  after_restart?: unknown; // the stored value, where another one is in effect until then
  in_use?: unknown; // what the node uses, where that differs from the value
  group: string;
  title: string;
  sentence: string;
  unit: string;
  level: "basic" | "advanced";
  unset: string; // meaning of no value
  control: "switch" | "choice" | "number" | "list" | "text" | "none";
  choices: readonly string[];
  minimum: number | null;
  maximum: number | null;
  is_whole: boolean;
  may_be_unset: boolean;
}

export interface SettingRow extends Setting {
  name: string;
  shown: string; // what the node really uses
  later: string | null; // the stored value that takes effect after a restart
}

export interface SettingGroup {
  title: string;
  rows: SettingRow[];
}

/** Groups in the order in which the node declares them, with the rows that a search finds. */
export function settingGroups(config: Record<string, Setting>, search: string, withAdvanced: boolean): SettingGroup[] {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const groups = new Map<string, SettingRow[]>();
  for (const row of settingRows(config)) {
    const text = `${row.name} ${row.title} ${row.sentence} ${row.group}`.toLowerCase();
    const isWanted = words.length > 0 ? words.every((word) => text.includes(word)) : withAdvanced || row.level === "basic";
    if (isWanted || row.later !== null) groups.set(row.group, [...(groups.get(row.group) ?? []), row]);
  }
  return [...groups].map(([title, rows]) => ({ title, rows }));
}

function settingRows(config: Record<string, Setting>): SettingRow[] {
  return Object.entries(config).map(([name, setting]) => ({
    ...setting,
    name,
    shown: "in_use" in setting ? shownSetting(setting, setting.in_use) : shownSetting(setting, setting.value),
    later: "after_restart" in setting ? shownSetting(setting, setting.after_restart) : null,
  }));
}

/** 4000 -> "4,000 MB", nothing -> "measured". */
function shownSetting({ unset, unit }: Setting, value: unknown): string {
  const isUnset = value === null || value === undefined || value === "" || (Array.isArray(value) && value.length === 0);
  if (isUnset) return unset || "not set";
  return typeof value === "number" && unit ? `${number(value)} ${value === 1 ? unit.replace(/s$/, "") : unit}` : shownValue(value);
}

function number(value: number): string {
  return Number.isInteger(value) ? count(value) : String(value);
}

/** Initial text of a field: the stored value, otherwise the value in effect. */
export function typedText(setting: Setting): string {
  const value = "after_restart" in setting ? setting.after_restart : setting.value;
  if (value === null || value === undefined) return "";
  return Array.isArray(value) ? value.join(", ") : String(value);
}

export function shownValue(value: unknown): string {
  if (value === null || value === undefined || value === "") return "not set";
  if (typeof value === "boolean") return value ? "on" : "off";
  if (Array.isArray(value)) return value.length === 0 ? "none" : value.join(", ");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/**
 * "" -> null (the default), "true" -> true, "8" -> 8, anything else the text itself.
 *
 * So is a number of 400 digits: it would become Infinity, which JSON writes as null, the default.
 */
export function typedValue(text: string): unknown {
  const value = text.trim();
  if (value === "") return null;
  if (value === "true" || value === "false") return value === "true";
  return /^-?\d+(\.\d+)?$/.test(value) && Number.isFinite(Number(value)) ? Number(value) : value;
}

const VAST = 1e9; // a bound that no computer reaches is not worth a word

/** "20 or more MB", "1 to 100 %": the range of a number in words. */
export function rangeWords({ control, minimum, maximum, unit, allowed }: Setting): string {
  if (control !== "number") return `Allowed: ${allowed}.`;
  if (minimum !== null && maximum !== null && maximum < VAST) return `From ${number(minimum)} to ${number(maximum)} ${unit}`.trim() + ".";
  return minimum === null ? "" : `At least ${number(minimum)} ${unit}`.trim() + ".";
}
