// The owner's rules: the decision in effect, and the sensors that the rules use.

import type { OwnerPolicyStatus } from "../api/status";
import { clock } from "../format";
import { Card, Facts } from "./parts";

export function OwnerPolicyCard({ policy }: { policy: OwnerPolicyStatus }) {
  const { decision, readings } = policy;
  return (
    <Card title="This computer stays yours" hint="Training gives way by the rules that you set." aside={<a href="#settings">Settings</a>}>
      <p>
        {decision.reason}
        {decision.until !== null && ` Until ${clock(decision.until)}.`}
      </p>
      {readings.length > 0 && (
        <Facts rows={readings.map(({ name, value, is_known }) => [name, is_known ? value : <span class="muted">unknown: {value}</span>] as const)} />
      )}
    </Card>
  );
}
