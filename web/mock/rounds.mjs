// Pretended rounds, for developing their view: scenarios "swarm" and "crowd"; the others have had none.

const OWN = "12D3KooWQb1pUWp2vWm3zZ6i8kQ1y6r4P8sPpZ4nE8vK1tq9b7Zc";
const ROUNDS = 14;
const now = () => Date.now() / 1000;

const member = (index, part) => ({
  node_id: index === 0 ? OWN : `12D3KooWReplica${index}`.padEnd(52, "y"), wallet_id: `${index}`.padStart(16, "0"), part,
  refusal: part === "refused" ? "direction" : "", reason: part === "refused" ? "its direction disagrees with the majority" : "",
});

function round(number, size) {
  const isAbandoned = number === 3;
  const phases = isAbandoned ? { gather: 40, exchange: 0, vote: 0 } : { gather: 0.4, exchange: 3 + (number % 4), vote: 0.6 };
  const part = (index) => (isAbandoned ? "unjudged" : index === 1 && number === 1 ? "refused" : index === 2 && number === 5 ? "absent" : "accepted");
  return {
    stage: 0, layers: { start: 0, stop: 6 }, outer_step: ROUNDS - number, result: isAbandoned ? "abandoned" : "completed",
    abandoned_for: isAbandoned ? "no_answer" : null, reason: isAbandoned ? "too few members answered in time" : "", is_late: number === 2,
    ended_at: now() - 20 - 300 * number, seconds: phases.gather + phases.exchange + phases.vote, phases,
    members: Array.from({ length: size }, (_, index) => member(index, part(index))), bytes_sent: 18_900_000, bytes_received: 17_400_000,
    strategy: "streaming", part: "quarter 2 of 4", codec: "int8", aggregator: "trimmed_mean(0.2)", views: 1,
    certificate: isAbandoned ? null : { value: `${number}`.padStart(16, "3fa9"), votes: size, voters: size },
  };
}

export function rounds(scenario) {
  const size = { swarm: 4, crowd: 64 }[scenario] ?? 0;
  const list = size > 0 ? Array.from({ length: ROUNDS }, (_, number) => round(number, size)) : [];
  const contributor = (index) => ({ ...member(index, "accepted"), is_here: index === 0, rounds: 13, accepted: 13 - (index === 1), refused: Number(index === 1), absent: 0 });
  return {
    rounds: list, completed: size > 0 ? 13 : 0, abandoned: size > 0 ? { no_answer: 1 } : {}, accepted: 13 * size, refused: size > 0 ? { direction: 1 } : {},
    bytes_sent: 14 * 18_900_000, bytes_received: 14 * 17_400_000, hash_agreement_rate: 1, sync_success_rate: size > 0 ? 13 / 14 : null,
    contributors: Array.from({ length: size }, (_, index) => contributor(index)),
  };
}
