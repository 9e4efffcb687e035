// The shards of this computer, and who in the run has which.

import type { DataCoverage, DataStatus } from "../api/status";
import { bytes, count, plural } from "../format";
import { checkedWords, copyLevel, coverageSentence, originWords, USES } from "../words/data";
import { Card } from "./parts";

const LEVELS = ["nobody", "in part", "one computer", "several"];

export function ShardList({ data }: { data: DataStatus }) {
  return (
    <Card title="Shards of this computer" hint="In the order in which it reads them; then those it has read and still keeps." wide>
      <div class="scroll" role="region" aria-label="List of the shards" tabIndex={0}>
        <table class="shards">
          <thead>
            <tr>
              <th scope="col">Shard</th>
              <th scope="col">What for</th>
              <th scope="col">Kept here</th>
              <th scope="col">Checked</th>
              <th scope="col">Came from</th>
            </tr>
          </thead>
          <tbody>
            {data.shards.map((shard) => (
              <tr key={shard.shard}>
                <th scope="row">{count(shard.shard)}</th>
                <td>{shard.use === "in_use" ? <span class="pill tone-good">{USES[shard.use]}</span> : USES[shard.use]}</td>
                <td>{shard.bytes === null ? "not yet" : bytes(shard.bytes)}</td>
                <td>{checkedWords(shard, data)}</td>
                <td>{originWords(shard)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <p class="muted small">
        {data.files_from_nodes > 0
          ? `Other computers gave ${plural(data.files_from_nodes, "file")} while the source did not answer.`
          : "Everything came from the source so far; while it does not answer, other computers of the run are asked."}
      </p>
    </Card>
  );
}

export function CoverageCard({ coverage, data }: { coverage: DataCoverage; data: DataStatus }) {
  const sentence = coverageSentence(coverage, data);
  return (
    <Card title="In the whole run" hint="Which parts of the text the computers of this run keep, from the first shard to the last." wide>
      <p>{sentence}</p>
      {coverage.copies.length > 0 && (
        <>
          <div class="coverage" role="img" aria-label={sentence}>
            {coverage.copies.map((copies, at) => (
              <span key={at} class={`cell copies-${copyLevel(copies)}`} />
            ))}
          </div>
          <ul class="coverage-legend small muted">
            {LEVELS.map((words, level) => (
              <li key={words}>
                <span class={`cell copies-${level}`} /> {words}
              </li>
            ))}
          </ul>
        </>
      )}
    </Card>
  );
}
