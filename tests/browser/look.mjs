// look.mjs URL FOLDER TEXT: opens the page, says "open", waits until TEXT is on it, without reloading; takes
// screenshots and prints what axe found, what was fetched and whether anything sticks out, as JSON.
import { launch, look } from "./looks.mjs";

const [url, folder, text] = process.argv.slice(2);
const browser = await launch();
const result = { fetched: [], loads: 0, looks: [], errors: [] };
try {
  const page = await browser.newPage({ viewport: { width: 1100, height: 900 }, colorScheme: "light" });
  page.on("request", (request) => result.fetched.push(request.url()));
  page.on("load", () => result.loads++);
  page.on("pageerror", (error) => result.errors.push(String(error)));
  page.on("console", (said) => said.type() === "error" && result.errors.push(said.text())); // also what the page's policy forbids
  await page.goto(url);
  await page.getByText("takes pushes").first().waitFor();
  console.log("open");
  await page.getByText(text).first().waitFor({ timeout: 60000 });
  result.looks = await look(page, folder);
} finally {
  await browser.close();
}
console.log(JSON.stringify(result));
