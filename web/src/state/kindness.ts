// How training gives way to the owner of this computer; mirrors KindnessBody in neuroshard/api/bodies/node.py.

export interface Decision {
  action: "run" | "throttle" | "pause";
  reason: string;
  rule: string; // the setting that decided; "user": a pause by hand; "": nothing holds training up
  until: number | null;
  share: number | null; // of the time, in which training computes
}

export interface KindnessStatus {
  decision: Decision;
  readings: { name: string; value: string; is_known: boolean }[];
}

/** Whether a rule holds training up, not a person: then nobody can resume it by hand. */
export function isPausedByRule({ decision }: KindnessStatus): boolean {
  return decision.action === "pause" && decision.rule !== "" && decision.rule !== "user";
}
