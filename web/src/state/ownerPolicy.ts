// The effect of the owner's rules on training.

import type { OwnerPolicyStatus } from "../api/status";

/** Whether a rule pauses training, and not a person. Nobody can resume such a pause by hand. */
export function isPausedByRule({ decision }: OwnerPolicyStatus): boolean {
  return decision.action === "pause" && decision.rule !== "" && decision.rule !== "user";
}
