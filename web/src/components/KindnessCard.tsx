// How training gives way: what holds now, and what the owner's rules look at.

import { clock } from "../format";
import type { KindnessStatus } from "../state/kindness";
import { Card, Facts } from "./parts";

export function KindnessCard({ kindness }: { kindness: KindnessStatus }) {
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
