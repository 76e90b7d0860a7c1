// Backups to a bucket of the server's. A handle is {id, dir} as ever, and can be kept anywhere as JSON.

const THREE_DAYS = 259200;

export async function createBackup(cloudflare, ask, options) {
  const { dir, name, ttl = THREE_DAYS, gitignore = false, excludes = [], localBucket } = options;
  const check = (fine, reason) => {
    if (!fine) throw failure(cloudflare.InvalidBackupConfigError, "INVALID_BACKUP_CONFIG", 400, `BackupOptions.${reason}`, { reason });
  };
  check(name === undefined || (typeof name === "string" && name.length <= 256), "name must be a string of at most 256 characters");
  check(name === undefined || !/[\u0000-\u001f\u007f]/.test(name), "name must not contain control characters");
  check(typeof ttl === "number" && ttl > 0, "ttl must be a positive number of seconds");
  check(typeof gitignore === "boolean", "gitignore must be a boolean");
  check(Array.isArray(excludes) && excludes.every((one) => typeof one === "string"), "excludes must be an array of strings");
  try {
    const { backup } = await ask({ dir, name, ttl, useGitignore: gitignore, excludes });
    return { id: backup.id, dir, ...(localBucket ? { localBucket } : {}) };
  } catch (error) {
    throw failure(cloudflare.BackupCreateError, "BACKUP_CREATE_FAILED", 500, error.message, { dir }, error);
  }
}

export async function restoreBackup(cloudflare, ask, { id, dir }) {
  try {
    await ask({ backup: id, dir });
    return { success: true, dir, id };
  } catch (error) {
    if (error.code === "backup_not_found")
      throw failure(cloudflare.BackupNotFoundError, "BACKUP_NOT_FOUND", 404, error.message, { backupId: id }, error);
    if (error.code === "backup_expired") {
      const context = { backupId: id, expiredAt: error.details?.expiresAt };
      throw failure(cloudflare.BackupExpiredError, "BACKUP_EXPIRED", 400, error.message, context, error);
    }
    throw failure(cloudflare.BackupRestoreError, "BACKUP_RESTORE_FAILED", 500, error.message, { dir, backupId: id }, error);
  }
}

function failure(Kind, code, httpStatus, message, context, cause) {
  const error = new Kind({ code, message, context, httpStatus, timestamp: new Date().toISOString() });
  if (cause) error.cause = cause;
  return error;
}
