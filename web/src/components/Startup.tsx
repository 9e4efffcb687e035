// Start-up progress from the first second: what is done, what runs, what comes.

import type { StartupStep } from "../api/status";
import { Card, Icon } from "./parts";

const WORDS = { pending: "to do", running: "running", done: "done", failed: "failed" };

export function Startup({ stages }: { stages: StartupStep[] }) {
  const done = stages.filter((stage) => stage.state === "done").length;
  return (
    <Card
      title="Getting ready"
      hint="The first start takes longest: it prepares the training text once. Later starts reuse it."
      wide
      aside={<span class="muted small">{`${done} of ${stages.length} done`}</span>}
    >
      <ol class="stages">
        {stages.map((stage) => (
          <li key={stage.name} class={`stage stage-${stage.state}`}>
            <span class="stage-mark" aria-hidden="true">
              {stage.state === "done" && <Icon name="good" />}
              {stage.state === "failed" && <Icon name="bad" />}
            </span>
            <div>
              <span class="stage-name">{stage.name}</span>
              <span class="hidden-visually">: {WORDS[stage.state]}</span>
              <p class="muted small stage-detail">{stage.state === "done" ? "" : stage.detail}</p>
              {stage.fraction !== null && stage.state === "running" && (
                <div class="bar-track" role="progressbar" aria-label={stage.name} aria-valuenow={Math.round(stage.fraction * 100)}>
                  <div class="bar-fill" style={{ width: `${stage.fraction * 100}%` }} />
                </div>
              )}
            </div>
          </li>
        ))}
      </ol>
    </Card>
  );
}
