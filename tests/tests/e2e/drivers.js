// Connects with each JavaScript driver and prints `driver SQLSTATE` a line.
const { Client } = require('pg');
const postgres = require('postgres');

const [port, user] = [Number(process.argv[1]), process.argv[2]];
const target = { host: '127.0.0.1', port, user, database: 'prod' };

async function main() {
  const client = new Client(target);
  client.on('error', () => {});
  await client.connect().then(
    async () => { await client.end(); console.log('node-pg in'); },
    (error) => console.log('node-pg', error.code),
  );
  const sql = postgres({ ...target, max: 1, connect_timeout: 5 });
  await sql`select 1`.then(
    () => console.log('postgres.js in'),
    (error) => console.log('postgres.js', error.code),
  );
  await sql.end({ timeout: 1 });
}

main();
