import type { ComponentChildren } from "preact";

/** What is missing, and what to do about it. */
export function Empty({ title, children, testid }: { title: string; children?: ComponentChildren; testid?: string }) {
  return (
    <div class="empty" data-testid={testid}>
      <p class="empty-title">{title}</p>
      {children}
    </div>
  );
}
