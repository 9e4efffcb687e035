// Turns the answer of /api/config into groups of settings, and what a reader types into a JSON value. Pure.

import { count } from "../format";

export interface Setting {
  value: unknown;
  source: string;
  allowed: string;
  applies: string;
  owner: string; // how its owner changes it, where a page may not; otherwise empty
  after_restart?: unknown; // what is stored, where another value holds until then
}

export interface SettingRow extends Setting {
  name: string;
  title: string;
  shown: string;
  later: string | null; // the stored value that holds after a restart
  editable: boolean;
  choices: readonly string[]; // empty: any text
}

export interface SettingGroup {
  title: string;
  rows: SettingRow[];
}

const IN_CAPITALS = /\b(cpu|gb|gpu|lan|json|url)\b/g;
const REST = "More";
const GROUPS: readonly (readonly [string, RegExp])[] = [
  ["When it works", /^(train|idle_|pause_|cpu_percent|gpu_)/],
  ["What it may use of this computer", /^(device|memory|cpu_threads|max_storage|max_checkpoint_storage|checkpoint_)/],
  ["The network", /^(network|peer|p2p_|max_upload|monthly|lan_discovery|port_mapping|relay)/],
  ["The run and its data", /^(run$|genesis|inner_steps|max_stages|spare_stages)/],
  ["This program", /^(host|port|browser|log_json|verbose|data_dir|token|update)/],
];

export function settingGroups(config: Record<string, Setting>): SettingGroup[] {
  const groups = new Map<string, SettingRow[]>([...GROUPS.map(([title]) => title), REST].map((title) => [title, []]));
  for (const row of settingRows(config)) {
    const title = GROUPS.find(([, names]) => names.test(row.name))?.[0] ?? REST;
    groups.get(title)?.push(row);
  }
  return [...groups].filter(([, rows]) => rows.length > 0).map(([title, rows]) => ({ title, rows }));
}

/** "max_checkpoint_storage" -> "Max checkpoint storage", "cpu_threads" -> "CPU threads". */
function titleOf(name: string): string {
  const words = name.replaceAll("_", " ").replace("p2p", "node").replace(IN_CAPITALS, (word) => word.toUpperCase());
  return words.charAt(0).toUpperCase() + words.slice(1);
}

function settingRows(config: Record<string, Setting>): SettingRow[] {
  return Object.entries(config).map(([name, setting]) => ({
    ...setting,
    name,
    title: titleOf(name),
    shown: shownSetting(setting.value, setting.allowed),
    later: "after_restart" in setting ? shownSetting(setting.after_restart, setting.allowed) : null,
    editable: setting.owner === "" && name !== "token" && !setting.applies.startsWith("only"),
    choices: choicesOf(setting),
  }));
}

/** "megabytes, at least 1; unset: measured": 4000 -> "4,000 megabytes", nothing -> "measured". */
function shownSetting(value: unknown, allowed: string): string {
  const unset = /unset: ([^;]+)$/.exec(allowed)?.[1];
  const unit = /^(megabytes|seconds|gigabytes a day|megabits a second)\b/.exec(allowed)?.[1];
  if ((value === null || value === undefined || value === "") && unset) return unset;
  return typeof value === "number" && unit ? `${count(value)} ${unit}` : shownValue(value);
}

/** Initial text of a field: the stored value, otherwise the value in effect. */
export function typedText(setting: Setting): string {
  const value = "after_restart" in setting ? setting.after_restart : setting.value;
  if (value === null || value === undefined) return "";
  return Array.isArray(value) ? value.join(", ") : String(value);
}

export function shownValue(value: unknown): string {
  if (value === null || value === undefined || value === "") return "not set";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (Array.isArray(value)) return value.length === 0 ? "none" : value.join(", ");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** "true or false; ..." and "auto, cuda, mps or cpu" are lists of all that is allowed. */
function choicesOf({ value, allowed }: Setting): readonly string[] {
  if (typeof value === "boolean") return ["true", "false"];
  const words = /^([a-z_]+(?:, [a-z_]+)*),? or ([a-z_]+)(?:[:;].*)?$/.exec(allowed);
  return words ? [...(words[1] ?? "").split(", "), words[2] ?? ""] : [];
}

/** "" -> null (the default), "true" -> true, "8" -> 8, anything else the text itself. */
export function typedValue(text: string): unknown {
  const value = text.trim();
  if (value === "") return null;
  if (value === "true" || value === "false") return value === "true";
  return /^-?\d+(\.\d+)?$/.test(value) ? Number(value) : value;
}
