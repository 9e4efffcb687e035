// Turns the answer of /api/config into rows. Pure.

export interface SettingRow {
  name: string;
  value: string;
  source: string;
}

/** Accepts {settings: {key: value}, sources: {key: source}} and a plain {key: value}. */
export function settingRows(config: unknown): SettingRow[] {
  if (!isRecord(config)) return [];
  const values = isRecord(config["settings"]) ? config["settings"] : config;
  const sources = isRecord(config["sources"]) ? config["sources"] : {};
  return Object.keys(values)
    .filter((name) => name !== "sources")
    .sort()
    .map((name) => ({ name, value: shown(values[name]), source: String(sources[name] ?? "default") }));
}

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function shown(value: unknown): string {
  if (value === null || value === undefined || value === "") return "–";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
