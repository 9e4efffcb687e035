// The part of a node in the run: its layers, or none when it is a trainer.

import { layerRange } from "../format";

type Layers = { start: number; stop: number } | null | undefined;

const ROLE_WORDS: Record<string, string> = {
  driver: "Driver (feeds text in)",
  worker: "Worker (middle layers)",
  validator: "Validator (measures the loss)",
};

/** A node without layers that drives; without roles it is still on its way. */
export function isTrainer(roles: readonly string[], layers: Layers): boolean {
  return !layers && roles.includes("driver");
}

export function roleWords(roles: readonly string[], layers: Layers): string {
  if (isTrainer(roles, layers)) return "Trainer (feeds text in, the layers are on other computers)";
  if (roles.includes("driver") && roles.includes("validator")) return "Driver and Validator: does everything itself";
  return roles.map((role) => ROLE_WORDS[role] ?? role).join(", ");
}

/** The reason for a missing curve: a node in the middle of a pipeline computes no loss. */
export function noCurveWords(roles: readonly string[]): string {
  if (roles.length > 0 && roles.every((role) => role === "worker")) {
    return "This computer holds layers in the middle: the computers with the first and the last layers show the curve.";
  }
  return "The curve appears with the first learning step.";
}

export function shortRoleWords(roles: readonly string[], layers: Layers, between: string): string {
  return isTrainer(roles, layers) ? "trainer" : roles.join(between);
}

export function layerWords(roles: readonly string[], layers: Layers): string {
  if (layers) return layerRange(layers);
  return isTrainer(roles, layers) ? "no layers" : "–";
}
