// The runs that computers of the local network announce, in the wizard and in the dashboard.

import type { NearbyRunBody } from "../api/bodies";
import { plural } from "../format";
import { NEARBY } from "./words";

interface Props {
  heading: "h2" | "h3";
  runs: NearbyRunBody[];
  busy: boolean;
  onJoin: (runId: string) => void;
}

/** The list follows every answer of the program. */
export function NearbyRuns({ heading: Heading, runs, busy, onJoin }: Props) {
  return (
    <section class="nearby-runs" aria-labelledby="nearby">
      <Heading id="nearby">{NEARBY.title(runs.length)}</Heading>
      <div role="status">
        {runs.length === 0 && <p class="muted small">{NEARBY.none}</p>}
        <ul>
          {runs.map((run) => (
            <li key={run.run_id}>
              <span>
                <strong>{NEARBY.name(run)}</strong> <span class="muted">({plural(run.computers, "computer")})</span>
              </span>
              <button type="button" class="button button-primary" aria-label={`${NEARBY.join} ${NEARBY.name(run)}`} aria-disabled={busy} onClick={() => onJoin(run.run_id)}>
                {NEARBY.join}
              </button>
            </li>
          ))}
        </ul>
      </div>
      {runs.length > 0 && <p class="muted small">{NEARBY.about}</p>}
    </section>
  );
}
