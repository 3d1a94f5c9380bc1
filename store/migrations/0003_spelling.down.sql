ALTER TABLE subscriptions DROP COLUMN spelling;
