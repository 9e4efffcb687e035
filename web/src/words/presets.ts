// The three sets of limits in words: what each leaves to the owner, and what it costs.

import type { PresetBody } from "../api/bodies";

export type PresetName = PresetBody["name"];

export const PRESETS: Record<PresetName, string> = { light: "Light", balanced: "Balanced", everything: "Everything" };
export const OWN_LIMITS = "Own limits";
export const NO_LIMITS = "No limits set";
export const PRESET_LABEL = "What this computer gives";
export const PRESET_NOW = "This is in effect now.";
export const PRESET_STARTS = "Upload, speed and pauses change now. The memory changes when NeuroShard starts again: press Restart.";
export const RESTART = "Restart";
export const RESTART_NOW = "Restart now";
export const RESTART_ABOUT = "NeuroShard saves a checkpoint and starts again. The stored memory limit then takes effect.";
const NOISE: Record<PresetName, string> = { light: "The fan stays quiet.", balanced: "The fan may run.", everything: "The fan runs." };

/** "3,000 MB of memory, 40 % of the speed, upload up to 2.5 Mbit/s (27 GB per day). It pauses on battery …" */
export function presetEffects({ name, settings, gb_per_day: sent }: PresetBody): string {
  const memory = typeof settings.memory === "number" ? `${settings.memory.toLocaleString("en")} MB of memory` : "All memory but a reserve for you";
  const percent = Number(settings.cpu_percent);
  const speed = percent < 100 ? `${percent} % of the speed` : "full speed";
  const traffic = sent === null ? "no upload limit" : `upload up to ${settings.max_upload} Mbit/s (${Number(sent.toPrecision(2))} GB per day)`;
  const pauses = settings.pause_on_battery ? "It pauses on battery and while a program fills the screen." : "It also trains on battery and behind full-screen programs.";
  return `${memory}, ${speed}, ${traffic}. ${pauses} ${NOISE[name]}`;
}
