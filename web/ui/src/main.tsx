import { options, render } from "preact";
import { App } from "./app";
import { start } from "./live/live";
import { watchNavigation } from "./navigation";
import { watchTheme } from "./theme";
import "./styles/tokens.css";
import "./styles/base.css";
import "./styles/shell.css";
import "./styles/parts.css";
import "./styles/screens.css";

// However many documents a frame changes, the page is drawn once for the next picture, and not at all while hidden.
options.debounceRendering = (draw) => requestAnimationFrame(draw);

watchTheme();
watchNavigation();
start();

const root = document.getElementById("app");
if (root) {
  render(<App />, root);
}
