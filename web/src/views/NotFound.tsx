// An address that names no view.

export function NotFound({ wanted, views }: { wanted: string; views: readonly string[] }) {
  return (
    <div class="view">
      <h1 class="view-title">There is no such page</h1>
      <p>
        The dashboard has no view with the name <code>{wanted.slice(0, 60)}</code>. It has these:
      </p>
      <ul class="view-links">
        {views.map((name) => (
          <li key={name}>
            <a href={`#${name.toLowerCase()}`}>{name}</a>
          </li>
        ))}
      </ul>
    </div>
  );
}
