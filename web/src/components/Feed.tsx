// The events of the node and its run in sentences, newest first.

import type { FeedEvent } from "../api/status";
import { shortClock } from "../format";

export function Feed({ events, since }: { events: readonly FeedEvent[]; since: number }) {
  if (events.length === 0)
    return (
      <p class="muted small">
        Nothing since <time>{shortClock(since)}</time>.
      </p>
    );
  return (
    <div class="feed-frame" role="log" aria-label="Events, newest first" tabIndex={0}>
      <ol class="feed small">
        {events.map((event) => (
          <li key={`${event.subject} ${event.time}`} class={`tone-${event.tone}`}>
            <time>{shortClock(event.time)}</time>
            <i class="dot" aria-hidden="true" />
            <span>{event.sentence}</span>
          </li>
        ))}
      </ol>
    </div>
  );
}
