import { Empty } from "../parts/empty";

export function UnknownScreen({ path }: { path: string }) {
  return (
    <>
      <div class="screen-head">
        <h1>There is no such screen</h1>
      </div>
      <Empty title={path}>
        <p>
          This address leads nowhere. <a href="/">To Pulse</a>
        </p>
      </Empty>
    </>
  );
}
