// How training gives way to the owner of this computer.

import type { OwnerPolicyStatus } from "../api/status";

/** Whether a rule holds training up, not a person: then nobody can resume it by hand. */
export function isPausedByRule({ decision }: OwnerPolicyStatus): boolean {
  return decision.action === "pause" && decision.rule !== "" && decision.rule !== "user";
}
