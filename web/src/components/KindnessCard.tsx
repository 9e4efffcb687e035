// How training gives way: what holds now, and what the owner's rules look at.

import type { OwnerPolicyStatus } from "../api/status";
import { clock } from "../format";
import { Card, Facts } from "./parts";

export function KindnessCard({ kindness }: { kindness: OwnerPolicyStatus }) {
  const { decision, readings } = kindness;
  return (
    <Card title="This computer stays yours" hint="Training gives way by the rules that you set." aside={<a href="#settings">Settings</a>}>
      <p>
        {decision.reason}
        {decision.until !== null && ` Until ${clock(decision.until)}.`}
      </p>
      {readings.length > 0 && (
        <Facts rows={readings.map(({ name, value, is_known }) => [name, is_known ? value : <span class="muted">not known: {value}</span>] as const)} />
      )}
    </Card>
  );
}
