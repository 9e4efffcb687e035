// The three sets of limits in words: what each leaves to the owner, and what it costs.

import { listed } from "../format";
import type { LineBody, PresetBody } from "../api/bodies";

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

/** The GPUs that may train. */
export function gpuWords(gpus: readonly string[]): string {
  return gpus.length === 0 ? "No GPU found: the processor trains." : `GPU: ${listed(gpus)}. It trains if PyTorch supports it.`;
}

/** "Upload of your line: 18 Mbit/s, measured on 3 March 2026 …", or that it is assumed. */
export function lineWords({ upload, measured_at: at }: LineBody): string {
  if (at === null) return `Upload speed of your line: not measured yet, ${uploadWords(upload)} assumed. This computer measures it when it first sends to a computer outside your network. Light and Balanced then follow it.`;
  return `Upload speed of your line: ${uploadWords(upload)}, measured on ${dayWords(at)} while this computer sent to another one.`;
}

/** Bytes per second and seconds since 1970, as a fact: "18 Mbit/s upload, measured on 3 March 2026". */
export function lineSpeed(upload: number | null, at: number | null): string {
  return upload === null || at === null ? "upload not measured yet" : `${uploadWords((upload * 8) / 1e6)} upload, measured on ${dayWords(at)}`;
}

function dayWords(at: number): string {
  return new Date(at * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "long", year: "numeric" });
}

/** "18 Mbit/s" */
export function uploadWords(value: number): string {
  return `${Number(value.toPrecision(2))} Mbit/s`;
}

/** "3,000 MB of memory, 40 % of the speed, upload up to 2.5 Mbit/s (27 GB per day). It pauses on battery …" */
export function presetEffects({ name, settings, upload, gb_per_day: sent }: PresetBody): string {
  const memory = typeof settings.memory === "number" ? `${settings.memory.toLocaleString("en")} MB of memory` : "All memory but a reserve for you";
  const percent = Number(settings.cpu_percent);
  const speed = percent < 100 ? `${percent} % of the speed` : "full speed";
  const amount = sent === null ? "" : `${Number(sent.toPrecision(2))} GB per day`;
  const traffic = upload !== null ? `upload up to ${uploadWords(upload)} (${amount})` : amount ? `upload up to ${amount}` : "no upload limit";
  const pauses = settings.pause_on_battery ? "It pauses on battery and while a program fills the screen." : "It also trains on battery and behind full-screen programs.";
  return `${memory}, ${speed}, ${traffic}. ${pauses} ${NOISE[name]}`;
}
