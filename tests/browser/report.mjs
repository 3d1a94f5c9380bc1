// report.mjs FILE FOLDER: opens a report with and without JavaScript, chooses a day, sorts a table, prints it; takes
// screenshots and prints what axe found, what was fetched, what is seen and whether anything sticks out, as JSON.
import { launch, look } from "./looks.mjs";

const [file, folder] = process.argv.slice(2);
const browser = await launch();
const result = { fetched: [], looks: [], errors: [] };
const text = (page) => page.evaluate(() => document.body.innerText);
try {
  const page = await browser.newPage();
  page.on("request", (request) => result.fetched.push(request.url()));
  page.on("pageerror", (error) => result.errors.push(String(error)));
  page.on("console", (said) => said.type() === "error" && result.errors.push(said.text()));
  await page.goto(`file://${file}`);
  result.plots = await page.locator(".chart canvas").count();
  const drawn = (chart) => page.locator(`[data-chart="${chart}"] canvas`).evaluate((canvas) => canvas.toDataURL());
  const both = async () => [await drawn("latency"), await drawn("churn")];
  const whole = await both();
  result.days = await page.locator("nav option").allInnerTexts();
  await page.getByLabel("Plots by hour show").selectOption({ index: 3 });
  const day = await both();
  await page.getByLabel("Plots by hour show").selectOption({ index: 0 });
  result.zoom = { changed: whole.map((picture, i) => picture !== day[i]), back: (await both()).every((picture, i) => picture === whole[i]) };
  result.looks = await look(page, folder, "report-");
  await page.pdf({ path: `${folder}/report.pdf`, format: "A4" });
  await page.emulateMedia({ media: "print" });
  result.printed = await text(page);
  result.printedPlots = await page.evaluate(() => [...document.querySelectorAll(".chart canvas")].map((plot) => plot.clientWidth));
  await page.emulateMedia({ media: "screen" });
  await page.evaluate(() => { for (const fold of document.querySelectorAll("details")) fold.open = true; });
  const column = () => page.evaluate(() => [...document.querySelector("#health ~ details table.data").tBodies[0].rows].map((row) => row.cells[0].innerText));
  const before = await column();
  await page.locator("#health ~ details table.data th button").first().click();
  result.sorted = { before, after: await column() };
  result.unfolded = await look(page, folder, "unfolded-");
  const plain = await (await browser.newContext({ javaScriptEnabled: false })).newPage();
  await plain.goto(`file://${file}`);
  result.withoutScript = await plain.innerText("body");
} finally {
  await browser.close();
}
console.log(JSON.stringify(result));
