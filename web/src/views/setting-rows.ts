// Turns the answer of /api/config into rows, and what a reader types into a JSON value. Pure.

export interface Setting {
  value: unknown;
  source: string;
  allowed: string;
  applies: string;
}

export interface SettingRow extends Setting {
  name: string;
  shown: string;
  editable: boolean;
}

const NEVER_HERE = new Set(["token", "token_file"]); // secrets are not typed into a page

export function settingRows(config: Record<string, Setting>): SettingRow[] {
  return Object.entries(config).map(([name, setting]) => ({
    ...setting,
    name,
    shown: shown(setting.value),
    editable: !NEVER_HERE.has(name) && !setting.applies.startsWith("only"),
  }));
}

function shown(value: unknown): string {
  if (value === null || value === undefined || value === "") return "–";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** "" -> null (the default), "true" -> true, "8" -> 8, anything else the text itself. */
export function typedValue(text: string): unknown {
  const value = text.trim();
  if (value === "") return null;
  if (value === "true" || value === "false") return value === "true";
  return /^-?\d+(\.\d+)?$/.test(value) ? Number(value) : value;
}
